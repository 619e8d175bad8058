"""Costs: parameters and MACs by part before and after, and latency.

Missing parts of the content are taken from the findings of the evidence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from attnrx.evidence import Finding
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import MISSING, TIMES, fixed, interval, number, with_unit
from attnrx.reports.sections.section import Section

NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
ROLES = ("reference", "candidate")

Record = Mapping[str, Any]


def costs(content: ReportContent) -> Section | None:
    """Returns the tables of costs and latency, if available."""
    records, times = cost_records(content), latency_records(content)
    if records is None and not times:
        return None
    parts = [] if records is None else _parts(*records)
    return Section("costs", "Costs", {"parts": parts, "latency": [_latency(record) for record in times]})


def cost_records(content: ReportContent) -> tuple[Record, Record] | None:
    """Returns the costs of the original and of the candidate by part, or None."""
    if content.costs is not None:
        before, after = (own.to_record()["parts"] for own in content.costs)
        return before, after
    found = {finding.details.get("model"): finding for finding in _findings(content, "costs", "counted costs")}
    if not all(isinstance(found[role].details.get("parts"), Mapping) if role in found else False for role in ROLES):
        return None
    return found["reference"].details["parts"], found["candidate"].details["parts"]


def latency_records(content: ReportContent) -> list[Record]:
    """Returns the records of all latency comparisons."""
    if content.latency:
        return [asdict(entry) for entry in content.latency]
    return [finding.details for finding in _findings(content, "latency", "latency") if "ratio" in finding.details]


def total(record: Record, unit: str) -> int:
    """Returns the sum of "params" or "macs" over all parts."""
    return sum(part[unit] for part in record.values())


def change(old: int, new: int) -> str:
    """Formats the change of a cost in percent of the old one."""
    if not old or old == new:
        return MISSING
    return with_unit(fixed(100 * (new - old) / old, 2, signed=True), "%")


def _findings(content: ReportContent, check: str, quantity: str) -> Iterator[Finding]:
    findings = content.evidence.of(check) if content.evidence is not None else ()
    return (finding for finding in findings if finding.details.get("quantity") == quantity)


def _parts(before: Record, after: Record) -> list[dict[str, Any]]:
    zero = {"params": 0, "macs": 0}
    pairs = {name: (before.get(name, zero), after.get(name, zero)) for name in (*before, *after)}
    all_macs = total(before, "macs")
    rows = [
        _row(NAMES.get(name, name.replace("_", " ")), *pair, all_macs)
        for name, pair in pairs.items()
        if any(part[unit] for part in pair for unit in zero)
    ]
    sums = [{unit: total(record, unit) for unit in zero} for record in (before, after)]
    return [*rows, {**_row("whole model", sums[0], sums[1], all_macs), "total": True}]


def _row(name: str, old: Record, new: Record, all_macs: int) -> dict[str, Any]:
    cells = {unit: (number(old[unit]), number(new[unit]), change(old[unit], new[unit])) for unit in ("params", "macs")}
    return {"name": name, **cells, "share": round(old["macs"] / max(all_macs, 1), 4), "total": False}


def _latency(record: Record) -> dict[str, str]:
    ratio, conditions, threads = record["ratio"], record["conditions"], record["threads"]
    kernels = dict.fromkeys((record["reference_kernel"], record["candidate_kernel"]))
    where = [
        record["hardware"],
        f"{threads} thread{'' if threads == 1 else 's'}",
        conditions["precision"],
        f"torch {record['torch_version']}",
    ]
    return {
        "batch": str(record["batch"]),
        "reference": _milliseconds(record["reference"]),
        "candidate": _milliseconds(record["candidate"]),
        "ratio": fixed(ratio["value"], 3) + TIMES,
        "interval": interval(ratio["low"], ratio["high"]),
        "kernel": " → ".join(kernels),
        "where": ", ".join([*where, "compiled"] if conditions["compiled"] else where),
    }


def _milliseconds(timing: Record) -> str:
    return f"{number(1000 * timing['median'])} ({number(1000 * timing['low'])} to {number(1000 * timing['high'])})"
