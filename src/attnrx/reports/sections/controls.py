"""Controls: the candidate beside other choices of as many directions, which any real choice has to beat."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import IntervalRow, axis_picture, span
from attnrx.reports.numbers import interval, quantity
from attnrx.reports.sections.findings import RESULT
from attnrx.reports.sections.section import Section

CHECK = "controls"


def controls(content: ReportContent) -> Section | None:
    """Gives a plot of dots and intervals, on one axis per unit."""
    found = [finding for finding in (content.evidence.of(CHECK) if content.evidence else ()) if finding.value is not None]
    if not found:
        return None
    by_unit = sorted(found, key=lambda finding: finding.unit)  # stable: the check's order stays within a unit
    plots = [_plot(unit, list(group)) for unit, group in groupby(by_unit, key=lambda finding: finding.unit)]
    return Section("controls", "Controls", {"plots": plots})


def _plot(unit: str, group: Sequence[Finding]) -> dict[str, Any]:
    rows = [_row(finding) for finding in group]
    axis = span((value for row in rows for value in row.values()), room=0.08)
    lines = [
        {
            "claim": finding.claim,
            "result": RESULT[finding.holds],
            "picture": row.draw(axis),
            "value": quantity(finding.value, finding.unit, finding.low, finding.high),
            "interval": interval(finding.low, finding.high, finding.unit),
        }
        for finding, row in zip(group, rows, strict=True)
    ]
    return {"unit": unit, "rows": lines, "axis": axis_picture(axis, f"axis in {unit}" if unit else "axis")}


def _row(finding: Finding) -> IntervalRow:
    draws = finding.details.get("draws", ())
    numbers = [float(draw) for draw in draws if isinstance(draw, int | float)] if isinstance(draws, list | tuple) else []
    return IntervalRow(finding.claim, finding.value, finding.low, finding.high, numbers, finding.limit)
