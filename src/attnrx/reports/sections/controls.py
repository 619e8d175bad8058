"""Controls: the candidate against matched controls with the same number of directions."""

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import IntervalRow, axis_picture, span
from attnrx.reports.numbers import interval, known, quantity
from attnrx.reports.sections.section import Section

CHECK = "controls"


def controls(content: ReportContent) -> Section | None:
    """Returns plots of values with intervals, one axis per unit."""
    findings = content.evidence.of(CHECK) if content.evidence is not None else ()
    found = [finding for finding in findings if known(finding.value) is not None]
    if not found:
        return None
    by_unit = sorted(found, key=lambda finding: finding.unit)  # stable: the check's order stays within a unit
    plots = [_plot(unit, list(group)) for unit, group in groupby(by_unit, key=lambda finding: finding.unit)]
    return Section("controls", "Controls", {"plots": plots})


def _plot(unit: str, group: Sequence[Finding]) -> dict[str, Any]:
    rows = [_row(finding) for finding in group]
    axis = span((value for row in rows for value in row.values()), include=(0.0,), room=0.08)
    lines = [
        {
            "claim": finding.claim,
            "result": finding.outcome,
            "picture": row.draw(axis),
            "value": quantity(finding.value, finding.unit, finding.low, finding.high),
            "interval": interval(finding.low, finding.high),
        }
        for finding, row in zip(group, rows, strict=True)
    ]
    return {"unit": unit, "rows": lines, "axis": axis_picture(axis, f"axis in {unit}" if unit else "axis")}


def _row(finding: Finding) -> IntervalRow:
    low, high = known(finding.low), known(finding.high)
    return IntervalRow(finding.claim, finding.value, low, high, _advantages(finding), finding.limit)


def _advantages(finding: Finding) -> list[float]:
    """Returns the candidate's advantage over every draw of the control; their mean is the value of the finding."""
    draws, candidate = finding.details.get("draws"), finding.details.get("candidate")
    if not isinstance(draws, list | tuple) or not draws or candidate is None:
        return []
    over = [draw - candidate for draw in draws]
    # Lower discrepancy and higher accuracy are better: the sign follows from the value of the finding.
    same_sign = abs(fmean(over) - finding.value) <= abs(fmean(over) + finding.value)
    return over if same_sign else [-advantage for advantage in over]
