"""What a model costs and what a smaller one saves, in a record and in a table."""

from typing import Any

import attnrx as rx
from attnrx.cli.outcome import Table


def priced(before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts") -> dict[str, Any]:
    """Gives the costs of both models as JSON-ready values; what is saved is in percent of the first."""
    saving = before.saving(after)
    return {
        "original": {"params": before.params, "macs": before.macs},
        "compressed": {"params": after.params, "macs": after.macs},
        "params_down_percent": 100 * saving.params_share,
        "macs_down_percent": 100 * saving.macs_share,
    }


def prices_table(before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts") -> Table:
    """Gives the costs of both models, and what is saved in percent."""
    saving = before.saving(after)
    return Table(
        ("", "original", "realized", "saved"),
        (
            ("parameters", f"{before.params:,}", f"{after.params:,}", f"{100 * saving.params_share:.3f} %"),
            ("MACs", f"{before.macs:,}", f"{after.macs:,}", f"{100 * saving.macs_share:.3f} %"),
        ),
    )
