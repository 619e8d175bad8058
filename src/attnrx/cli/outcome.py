"""The result of a command: a record for JSON, and texts for the console."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import attnrx as rx
from attnrx.support.tables import aligned_table


@dataclass(frozen=True)
class Outcome:
    """The result of a command: the record for --json, the texts to print, and the exit code."""

    record: Mapping[str, Any]
    shown: tuple[str, ...]
    code: int = 0


def as_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def significant(value: float, unit: str = "") -> str:
    """Formats a number with four significant digits and its unit."""
    return f"{value:.4g} {unit}".rstrip()


def cost_changes(original: "rx.costs.ModelCosts", smaller: "rx.costs.ModelCosts") -> dict[str, Any]:
    """Returns the costs of both models as JSON-ready values, with savings in percent of the first."""
    return {
        "original": {"params": original.params, "macs": original.macs},
        "compressed": {"params": smaller.params, "macs": smaller.macs},
        "params_down_percent": _saved(original.params, smaller.params),
        "macs_down_percent": _saved(original.macs, smaller.macs),
    }


def cost_table(original: "rx.costs.ModelCosts", smaller: "rx.costs.ModelCosts") -> str:
    """Returns the table of the costs of both models, with savings in percent."""
    pairs = (("parameters", original.params, smaller.params), ("MACs", original.macs, smaller.macs))
    rows = tuple((name, f"{before:,}", f"{after:,}", f"{_saved(before, after):.3f} %") for name, before, after in pairs)
    return aligned_table(("", "original", "realized", "saved"), rows)


def _saved(before: int, after: int) -> float:
    return 100 * (before - after) / max(before, 1)
