"""Costs: parameters and MACs by part before and after, and latency.

Missing parts of the content are taken from the findings of the evidence.
"""

from typing import Any

from attnrx.show.reports.content import ReportContent
from attnrx.show.reports.headline import MeasuredSpeed, Record, cost_records, latency_records
from attnrx.show.reports.numbers import MISSING, TIMES, fixed, number, with_unit
from attnrx.show.reports.sections.section import Section

NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
UNITS = ("params", "macs")


def costs(content: ReportContent) -> Section | None:
    """Returns the tables of costs and latency, if available."""
    records, latency = cost_records(content), latency_records(content)
    if records is None and not latency:
        return None
    parts = [] if records is None else _parts(*records)
    timed = [(record, MeasuredSpeed.of(record)) for record in latency]
    kinds = ["Parameters and MACs by part"] * bool(parts) + ["Latency in milliseconds"] * bool(latency)
    return Section("costs", "Costs", {"parts": parts, "latency": timed}, "; ".join(kinds))


def total(record: Record, unit: str) -> int:
    return sum(part[unit] for part in record.values())


def change(old: int, new: int) -> str:
    if not old or old == new:
        return MISSING
    return with_unit(fixed(100 * (new - old) / old, 2, signed=True), "%")


def _parts(before: Record, after: Record) -> list[dict[str, Any]]:
    """Returns the rows of the table: every part that costs anything before or after, and the whole model."""
    zero = dict.fromkeys(UNITS, 0)
    # Parts of both models, because compression adds some, e.g. predictors of tokens.
    pairs = {name: (before.get(name, zero), after.get(name, zero)) for name in (*before, *after)}
    shown = [(name, *pair) for name, pair in pairs.items() if any(part[unit] for part in pair for unit in UNITS)]
    total_before, total_after = ({unit: total(record, unit) for unit in UNITS} for record in (before, after))
    rows = []
    for name, old, new in (*shown, ("whole model", total_before, total_after)):
        cells = [
            text for unit in UNITS for text in (number(old[unit]), number(new[unit]), change(old[unit], new[unit]))
        ]
        # Of the original's MACs, for the bar of the row; four digits, because it is part of the page.
        share = round(old["macs"] / max(total_before["macs"], 1), 4)
        title = NAMES.get(name, name.replace("_", " "))
        rows.append({"name": title, "cells": cells, "share": share, "total": old is total_before})
    return rows
