"""The result in one sentence, the findings, every measured quantity before and after, and costs."""

from collections.abc import Iterator, Mapping
from typing import Any

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports.headline import (
    TOP_1,
    Record,
    cost_records,
    cost_totals,
    finding_of,
    nothing_removed,
    speeds,
    statements,
    summary_parts,
)
from attnrx.show.reports.numbers import MISSING, TIMES, fixed, known, number, quantity, typeset, with_unit

SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
NAMES = {
    "query_key": "query and key",
    "value_output": "value and output",
    "read_out": f"attention {TIMES} values",
    "mlp": "MLP",
}
UNITS = ("params", "macs")


def verdict(found: Evidence | None, records: Mapping[str, Record]) -> dict[str, Any]:
    """Returns the result: one sentence, the outcomes of the claims, and the quantities before and after; with the notes
    on images of the records of all parts.
    """
    evidence = found or Evidence((), {})
    notes = [str(note) for record in records.values() for note in record.get("notes") or ()]
    return {
        "state": evidence.outcome,
        "statements": statements(evidence),
        "answer": [
            tuple(map(typeset, (part.amount, part.conditions, part.interval, part.factors)))
            for part in summary_parts(evidence)
        ],
        "sentence": sentence(found),
        "after": "unchanged" if nothing_removed(evidence) else "smaller",
        "rows": list(_rows(evidence)),
        "times": _times(evidence),
        "conditions": next((speed.conditions for speed in speeds(evidence)), ""),
        "notes": list(dict.fromkeys(notes)),
        "failures": list(evidence.failures),
        "undecided": list(evidence.undecided),
    }


def sentence(evidence: Evidence | None) -> str:
    """Returns the outcomes of all claims in one sentence."""
    if evidence is None:
        return "Nothing was verified: this report holds no evidence."
    return f"{evidence.counted[0].upper()}{evidence.counted[1:]}."


def _times(evidence: Evidence) -> list[tuple[str, float, str]]:
    """Returns the times of the original, of the unchanged model in the runtime of this one, and of this model: name,
    share of the original's, and text; empty where the unchanged model was not timed.
    """
    speed = next(iter(speeds(evidence)), None)
    if speed is None or speed.reference_seconds is None or speed.by_runtime is None or nothing_removed(evidence):
        return []
    runtime = speed.runtime.partition(" in ")[0]
    shares = {speed.baseline: 1.0, f"unchanged, by {runtime}": 1 / speed.by_runtime, "smaller": 1 / speed.value}
    return [(name, share, f"{number(1000 * share * speed.reference_seconds)} ms") for name, share in shares.items()]


def _rows(evidence: Evidence) -> Iterator[tuple[str, ...]]:
    """Yields latency, accuracy, parameters and MACs, each if it was measured: name, before, after and change."""
    for speed in speeds(evidence)[:1]:
        # All from the speed of the sentence: the ratio of the two median times differs from the median of their ratios
        # where the load of the machine changes between rounds.
        before = speed.reference_seconds
        times = (
            [MISSING] * 2
            if before is None
            else [f"{number(1000 * each)} ms" for each in (before, before / speed.value)]
        )
        yield f"Latency at batch {speed.batch}", *times, f"{speed.text} {speed.interval}".strip()
    both = [finding_of(evidence, "accuracy", model) for model in ("reference", "candidate")]
    found = [each for each in both if each is not None and known(each.value) is not None]
    if len(found) == len(both):
        measure, change = str(found[1].details.get("measure", TOP_1)), finding_of(evidence, "accuracy change")
        texts = [quantity(each.value, "%", each.low, each.high) for each in found]
        points = "" if change is None else quantity(change.value, change.unit, change.low, change.high, signed=True)
        yield measure[0].upper() + measure[1:], *texts, points
    for unit, title in (("params", "Parameters"), ("macs", "MACs of one image")):
        if (totals := cost_totals(evidence, unit)) is not None:
            old, new = totals
            # One unit for both models, so that the numbers can be compared without converting.
            scale, prefix = next(((scale, prefix) for scale, prefix in SCALES if max(totals) >= scale), (1, ""))
            change = (
                "unchanged" if old == new else with_unit(fixed(100 * (new - old) / max(old, 1), 1, signed=True), "%")
            )
            yield title, number(old / scale) + prefix, number(new / scale) + prefix, change


def findings(evidence: Evidence | None) -> dict[str, Any] | None:
    """Returns the evidence table; the order of the findings within a check is preserved."""
    if evidence is None:
        return None
    shown, elsewhere = by_severity(evidence)
    groups: dict[str, list[Finding]] = {}
    for finding in shown:
        groups.setdefault(finding.check.replace("_", " "), []).append(finding)
    summary = f"{len(shown)} findings; {evidence.summary}"
    return {"groups": groups, "elsewhere": len(elsewhere), "summary": summary}


def by_severity(evidence: Evidence) -> tuple[list[Finding], list[Finding]]:
    """Separates the findings about one corruption at one severity: there are too many of them for the main table."""
    separated: tuple[list[Finding], list[Finding]] = [], []
    for finding in evidence.findings:
        # False and True are the indices of the two lists.
        separated[{"corruption", "severity"} <= finding.details.keys()].append(finding)
    return separated


def costs(evidence: Evidence) -> dict[str, Any] | None:
    """Returns the tables of costs and latency, if available."""
    records, latency = cost_records(evidence), speeds(evidence)
    if records is None and not latency:
        return None
    parts = [] if records is None else _parts(*records)
    kinds = ["Parameters and MACs by part"] * bool(parts) + ["Latency in milliseconds"] * bool(latency)
    return {"parts": parts, "latency": latency, "summary": "; ".join(kinds)}


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
