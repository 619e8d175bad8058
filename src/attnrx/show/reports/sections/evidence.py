"""The evidence: the table of findings, the matched controls, and the accuracy on corrupted images."""

from itertools import groupby
from statistics import fmean
from typing import Any

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports.content import ReportContent
from attnrx.show.reports.drawing import span
from attnrx.show.reports.figures import Chart, Curve, CurvePoint, IntervalRow, axis_picture
from attnrx.show.reports.numbers import interval, known, number
from attnrx.show.reports.sections.section import Figure, Section, described

Row = tuple[Finding, list[tuple[str, str]]]


def findings(content: ReportContent) -> Section | None:
    """Returns the evidence table; the order of the findings within a check is preserved."""
    if content.evidence is None:
        return None
    shown, elsewhere = by_severity(content.evidence)
    data = {"groups": _grouped(shown), "elsewhere": len(elsewhere)}
    return Section("evidence", "Evidence", data, f"{len(shown)} findings; {content.evidence.summary}")


def by_severity(evidence: Evidence) -> tuple[list[Finding], list[Finding]]:
    """Separates the findings about one corruption at one severity: there are too many of them for the main table."""
    separated: tuple[list[Finding], list[Finding]] = [], []
    for finding in evidence.findings:
        # False and True are the indices of the two lists.
        separated[{"corruption", "severity"} <= finding.details.keys()].append(finding)
    return separated


def _grouped(shown: list[Finding]) -> dict[str, list[Row]]:
    """Returns the findings and their described details by check."""
    groups: dict[str, list[Row]] = {}
    for finding in shown:
        row = finding, described(finding.details)
        groups.setdefault(finding.check.replace("_", " "), []).append(row)
    return groups


def controls(content: ReportContent) -> Section | None:
    """Returns plots of values with intervals, one axis per unit."""
    findings = content.evidence.of("controls") if content.evidence is not None else ()
    comparisons = [finding for finding in findings if known(finding.value) is not None]
    if not comparisons:
        return None
    by_unit = sorted(comparisons, key=lambda finding: finding.unit)  # stable: the check's order stays within a unit
    plots = [_plot(unit, list(group)) for unit, group in groupby(by_unit, key=lambda finding: finding.unit)]
    summary = f"{len(comparisons)} comparisons with matched controls"
    return Section("controls", "Controls", {"plots": plots}, summary)


def _plot(unit: str, group: list[Finding]) -> dict[str, Any]:
    rows = [
        IntervalRow(own.claim, own.value, known(own.low), known(own.high), _advantages(own), own.limit) for own in group
    ]
    # A common axis, so that the rows can be compared; with 0, where control and candidate are equal.
    axis = span((value for row in rows for value in row.values()), include=(0.0,), room=0.08)
    lines = [(finding, row.draw(axis)) for finding, row in zip(group, rows, strict=True)]
    return {"unit": unit, "rows": lines, "axis": axis_picture(axis, f"axis in {unit}" if unit else "axis")}


def _advantages(finding: Finding) -> list[float]:
    """Returns the candidate's advantage over every draw of the control; their mean is the value of the finding."""
    draws, candidate = finding.details.get("draws"), finding.details.get("candidate")
    if not isinstance(draws, list | tuple) or not draws or candidate is None:
        return []
    over = [draw - candidate for draw in draws]
    # Lower discrepancy and higher accuracy are better: the sign follows from the value of the finding.
    same_sign = abs(fmean(over) - finding.value) <= abs(fmean(over) + finding.value)
    return over if same_sign else [-advantage for advantage in over]


def robustness(content: ReportContent) -> Section | None:
    single_corruptions = by_severity(content.evidence)[1] if content.evidence else []
    if not single_corruptions:
        return None
    by_name: dict[str, list[CurvePoint]] = {}
    for finding in single_corruptions:
        points = by_name.setdefault(finding.details["corruption"], [])
        if known(finding.value) is not None:
            tip = f"{finding.claim}: {number(finding.value)} {interval(finding.low, finding.high)}".rstrip()
            severity, low, high = float(finding.details["severity"]), known(finding.low), known(finding.high)
            points.append(CurvePoint(severity, finding.value, low, high, tip))
    curves = tuple(
        Curve.numbered(index, name, sorted(points, key=lambda point: point.x))
        for index, (name, points) in enumerate(by_name.items())
        if points
    )
    chart = Chart("Change of accuracy on corrupted images", "severity", "accuracy change in points", curves, level=0.0)
    data = {"figure": Figure.of(chart, with_legend=True), "groups": _grouped(single_corruptions)}
    return Section("robustness", "Robustness", data, f"Accuracy under {len(curves)} corruptions")
