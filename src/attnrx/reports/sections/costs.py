"""Costs: parameters and MACs part by part, before and after, and what that is in time."""

from typing import Any

from attnrx.costs import LatencyComparison, ModelCosts
from attnrx.costs.timing import Timing
from attnrx.reports.content import ReportContent
from attnrx.reports.numbers import MISSING, TIMES, fixed, interval, number
from attnrx.reports.sections.section import Section


def costs(content: ReportContent) -> Section | None:
    """Gives the two tables, each where it is known."""
    if content.costs is None and not content.latency:
        return None
    parts = _parts(*content.costs) if content.costs is not None else []
    return Section("costs", "Costs", {"parts": parts, "latency": [_latency(entry) for entry in content.latency]})


def _parts(before: ModelCosts, after: ModelCosts) -> list[dict[str, Any]]:
    names = [name for name in before.parts if before.parts[name].params or before.parts[name].macs]
    rows = [_row(name.replace("_", " "), before, (before.parts[name], after.parts[name])) for name in names]
    return [*rows, {**_row("whole model", before, (before.total, after.total)), "total": True}]


def _row(name: str, whole: ModelCosts, pair: tuple) -> dict[str, Any]:
    old, new = pair
    return {
        "name": name,
        "params": (number(old.params), number(new.params), _change(old.params, new.params)),
        "macs": (number(old.macs), number(new.macs), _change(old.macs, new.macs)),
        "share": round(old.macs / max(whole.macs, 1), 4),
        "total": False,
    }


def _change(old: int, new: int) -> str:
    if not old or old == new:
        return MISSING
    return f"{fixed(100 * (new - old) / old, 2, signed=True)} %"


def _latency(entry: LatencyComparison) -> dict[str, str]:
    kernels = dict.fromkeys((entry.reference_kernel, entry.candidate_kernel))
    return {
        "batch": str(entry.batch),
        "reference": _milliseconds(entry.reference),
        "candidate": _milliseconds(entry.candidate),
        "ratio": fixed(entry.ratio.value, 3) + TIMES,
        "interval": interval(entry.ratio.low, entry.ratio.high),
        "kernel": " → ".join(kernels),
        "where": f"{entry.hardware}, {entry.threads} threads, {entry.conditions.precision}"
        + (", compiled" if entry.conditions.compiled else ""),
    }


def _milliseconds(timing: Timing) -> str:
    return f"{number(1000 * timing.median)} ({number(1000 * timing.low)} to {number(1000 * timing.high)})"
