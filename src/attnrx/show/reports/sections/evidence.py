"""The evidence: the table of findings, matched controls, accuracy on corrupted images, costs, and the provenance."""

from collections.abc import Mapping
from itertools import groupby
from statistics import fmean
from typing import Any

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.drawing import span
from attnrx.show.reports.figures import Chart, Curve, CurvePoint, Figure, IntervalRow, axis_picture
from attnrx.show.reports.headline import MeasuredSpeed, Record, cost_records, latency_records
from attnrx.show.reports.numbers import MISSING, TIMES, described, fixed, interval, known, number, with_unit

NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
UNITS = ("params", "macs")
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
    comparisons = [finding for finding in content.measured.of("controls") if known(finding.value) is not None]
    if not comparisons:
        return None
    by_unit = sorted(comparisons, key=lambda finding: finding.unit)  # stable: the check's order stays within a unit
    plots = []
    for unit, findings_of_unit in groupby(by_unit, key=lambda finding: finding.unit):
        group = list(findings_of_unit)
        rows = [
            IntervalRow(each.claim, each.value, known(each.low), known(each.high), _advantages(each), each.limit)
            for each in group
        ]
        # A common axis, so that the rows can be compared; with 0, where control and candidate are equal.
        axis = span((value for row in rows for value in row.values()), include=(0.0,), room=0.08)
        lines = [(finding, row.draw(axis)) for finding, row in zip(group, rows, strict=True)]
        picture = axis_picture(axis, f"axis in {unit}" if unit else "axis")
        plots.append({"unit": unit, "rows": lines, "axis": picture})
    summary = f"{len(comparisons)} comparisons with matched controls"
    return Section("controls", "Controls", {"plots": plots}, summary)


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
    single_corruptions = by_severity(content.measured)[1]
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
    data = {"figure": Figure.from_chart(chart, with_legend=True), "groups": _grouped(single_corruptions)}
    return Section("robustness", "Robustness", data, f"Accuracy under {len(curves)} corruptions")


def costs(content: ReportContent) -> Section | None:
    """Returns the tables of costs and latency, if available."""
    records, latency = cost_records(content.measured), latency_records(content.measured)
    if records is None and not latency:
        return None
    parts = [] if records is None else _parts(*records)
    timed = [(record, MeasuredSpeed.from_record(record)) for record in latency]
    kinds = ["Parameters and MACs by part"] * bool(parts) + ["Latency in milliseconds"] * bool(latency)
    return Section("costs", "Costs", {"parts": parts, "latency": timed}, "; ".join(kinds))


def _change(old: int, new: int) -> str:
    if not old or old == new:
        return MISSING
    return with_unit(fixed(100 * (new - old) / old, 2, signed=True), "%")


def _parts(before: Record, after: Record) -> list[dict[str, Any]]:
    """Returns the rows of the table: every part that costs anything before or after, and the whole model."""
    zero = dict.fromkeys(UNITS, 0)
    # Parts of both models, because compression adds some, e.g. predictors of tokens.
    pairs = {name: (before.get(name, zero), after.get(name, zero)) for name in (*before, *after)}
    shown = [(name, *pair) for name, pair in pairs.items() if any(part[unit] for part in pair for unit in UNITS)]
    total_before, total_after = (
        {unit: sum(part[unit] for part in record.values()) for unit in UNITS} for record in (before, after)
    )
    rows = []
    for name, old, new in (*shown, ("whole model", total_before, total_after)):
        cells = [
            text for unit in UNITS for text in (number(old[unit]), number(new[unit]), _change(old[unit], new[unit]))
        ]
        # Of the original's MACs, for the bar of the row; four digits, because it is part of the page.
        share = round(old["macs"] / max(total_before["macs"], 1), 4)
        title = NAMES.get(name, name.replace("_", " "))
        rows.append({"name": title, "cells": cells, "share": share, "total": old is total_before})
    return rows


def provenance(content: ReportContent) -> Section | None:
    """Returns the records of the parts, one table each."""
    parts: dict[str, Mapping[str, Any]] = {"this report": content.about}
    diagnosed: dict[str, Any] = {}
    if content.diagnosis is not None:
        diagnosed = {"fingerprint": content.diagnosis.fingerprint, **content.diagnosis.about}
        parts["the diagnosis"] = diagnosed
    if content.prescription is not None:
        record = {"fingerprint": content.prescription.fingerprint, **content.prescription.about}
        # The fields that the prescription shares with the diagnosis are listed once.
        new = {name: value for name, value in record.items() if name not in diagnosed or diagnosed[name] != value}
        parts["the prescription"] = new
    parts["the evidence"] = content.measured.about
    records = [(name, described(record)) for name, record in parts.items() if record]
    names = ", ".join(name for name, _ in records)
    return Section("provenance", "Provenance", {"records": records}, f"Records of {names}") if records else None
