"""The evidence: the table of findings, costs, and the provenance."""

from collections.abc import Mapping
from typing import Any

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.headline import MeasuredSpeed, Record, cost_records, latency_records
from attnrx.show.reports.numbers import MISSING, TIMES, fixed, number, with_unit

NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
UNITS = ("params", "macs")


def findings(content: ReportContent) -> Section | None:
    """Returns the evidence table; the order of the findings within a check is preserved."""
    if content.evidence is None:
        return None
    shown, elsewhere = by_severity(content.evidence)
    groups: dict[str, list[Finding]] = {}
    for finding in shown:
        groups.setdefault(finding.check.replace("_", " "), []).append(finding)
    data = {"groups": groups, "elsewhere": len(elsewhere)}
    return Section("evidence", "Evidence", data, f"{len(shown)} findings; {content.evidence.summary}")


def by_severity(evidence: Evidence) -> tuple[list[Finding], list[Finding]]:
    """Separates the findings about one corruption at one severity: there are too many of them for the main table."""
    separated: tuple[list[Finding], list[Finding]] = [], []
    for finding in evidence.findings:
        # False and True are the indices of the two lists.
        separated[{"corruption", "severity"} <= finding.details.keys()].append(finding)
    return separated


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
    """Returns the records of the parts."""
    records: dict[str, Mapping[str, Any]] = {"this report": content.about}
    for name, part in (("the diagnosis", content.diagnosis), ("the prescription", content.prescription)):
        if part is not None:
            records[name] = {"fingerprint": part.fingerprint, **part.about}
    records["the evidence"] = content.measured.about
    records = {name: record for name, record in records.items() if record}
    summary = f"Records of {', '.join(records)}"
    return Section("provenance", "Provenance", {"records": records}, summary) if records else None
