"""Aggregation of the evidence of several runs, e.g. of several seeds."""

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from attnrx.nouns.evidence import REPORTED, Evidence, Finding
from attnrx.show.checks.statistics import t_interval
from attnrx.support.errors import InvalidInput


def aggregate(runs: Sequence[Evidence]) -> Evidence:
    """Returns one finding per claim: the mean over the runs with its t interval, standard deviation and all values.

    A claim holds if it holds in every run, fails if it fails in any, and is undecided otherwise.

    Args:
        runs: The evidence of independent runs (different training seeds), verified by the same checks.

    Returns:
        The evidence over the runs; `n` of a finding is the number of runs.

    Raises:
        InvalidInput: There is no run, or the runs do not make the same claims.
    """
    if not runs:
        raise InvalidInput("aggregate was given no evidence; give the evidence of at least one run.")
    claims = [(finding.check, finding.claim) for finding in runs[0].findings]
    for number, run in enumerate(runs):
        other = [(finding.check, finding.claim) for finding in run.findings]
        # In any order: the checks may have run in another one.
        if sorted(claims) != sorted(other):
            raise InvalidInput(
                f"run {number} does not make the same claims as run 0 ({len(other)} against {len(claims)}); verify all "
                "by the same checks."
            )
    by_claim = [{(finding.check, finding.claim): finding for finding in run.findings} for run in runs]
    merged = tuple(_merge([findings[claim] for findings in by_claim]) for claim in claims)
    about: dict[str, Any] = {"runs": len(runs)}
    for name in dict.fromkeys(name for run in runs for name in run.about):
        values = [run.about.get(name) for run in runs]
        about[name] = values[0] if all(value == values[0] for value in values) else values
    return Evidence(merged, about)


def _merge(findings: list[Finding]) -> Finding:
    first, values = findings[0], [finding.value for finding in findings]
    several = len(values) > 1
    # Over runs, whose spread the intervals over images of single runs do not contain; a single run has no other.
    interval = t_interval(values) if several else first
    # Runs that were judged by different limits have no common claim: the quantity is reported.
    limit = first.limit if len({finding.limit for finding in findings}) == 1 else None
    fields = ("value", "low", "high", "outcome", "n", "seed")
    return Finding(
        first.check,
        first.claim,
        fmean(values),
        first.unit,
        limit=limit,
        outcome=REPORTED if limit is None else Evidence(tuple(findings), {}).outcome,
        low=interval.low,
        high=interval.high,
        n=len(values),
        details={
            "quantity": first.details.get("quantity"),
            "interval": "t over runs" if several else "of the one run",
            "deviation": stdev(values) if several else None,
            "runs": [{name: getattr(run, name) for name in fields} for run in findings],
        },
    )
