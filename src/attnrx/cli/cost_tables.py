"""Costs and savings of models as records and as tables."""

from typing import Any

import attnrx as rx
from attnrx.cli.outcome import Table


def priced(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None" = None
) -> dict[str, Any]:
    """Returns the costs of both models as JSON-ready values, with savings in percent of the first."""
    original, smaller = _both(before, after, convention)
    saving = original.saving(smaller)
    return {
        "original": price_record(original),
        "compressed": price_record(smaller),
        "params_down_percent": 100 * saving.params_share,
        "macs_down_percent": 100 * saving.macs_share,
    }


def price_record(price: "rx.costs.Price") -> dict[str, Any]:
    """Returns the totals of one model as JSON-ready values."""
    return {"params": price.params, "macs": price.macs, "mhsa_macs_per_layer": price.mhsa_macs_per_layer}


def prices_table(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None" = None
) -> Table:
    """Returns the table of the costs of both models, with savings in percent."""
    original, smaller = _both(before, after, convention)
    saving = original.saving(smaller)
    return Table(
        ("", "original", "realized", "saved"),
        (
            ("parameters", f"{original.params:,}", f"{smaller.params:,}", f"{100 * saving.params_share:.3f} %"),
            ("MACs", f"{original.macs:,}", f"{smaller.macs:,}", f"{100 * saving.macs_share:.3f} %"),
        ),
    )


def percent_table(original: "rx.costs.Price", smaller: "rx.costs.Price") -> Table:
    """Returns the table of the costs of both models, with the second in percent of the first."""
    shares = smaller.percent_of(original)
    attention = [sum(price.attention_macs) for price in (original, smaller)]
    return Table(
        ("", "original", "compressed", "of the original"),
        (
            ("parameters", f"{original.params:,}", f"{smaller.params:,}", f"{shares['params_percent']:.3f} %"),
            ("MACs", f"{original.macs:,}", f"{smaller.macs:,}", f"{shares['macs_percent']:.3f} %"),
            ("MACs of attention", f"{attention[0]:,}", f"{attention[1]:,}", f"{shares['mhsa_percent']:.3f} %"),
        ),
    )


def parts_table(price: "rx.costs.Price") -> Table:
    """Returns the table of the parts with nonzero costs, and their sum."""
    parts = [(name, part) for name, part in price.parts.items() if part.params or part.macs]
    rows = [(name.replace("_", " "), f"{part.params:,}", f"{part.macs:,}") for name, part in parts]
    return Table(("part", "parameters", "MACs"), (*rows, ("all", f"{price.params:,}", f"{price.macs:,}")))


def _both(
    before: "rx.costs.ModelCosts", after: "rx.costs.ModelCosts", convention: "rx.costs.Convention | None"
) -> "tuple[rx.costs.Price, rx.costs.Price]":
    counts = convention or rx.costs.SVDA
    return counts.price(before), counts.price(after)
