"""Aggregation of the evidence of several runs, e.g. of several seeds."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from attnrx.checks.statistics import t_interval
from attnrx.errors import InvalidInput
from attnrx.evidence import REPORTED, Evidence, Finding


def aggregate(runs: Sequence[Evidence]) -> Evidence:
    """Returns one finding per claim: the mean over the runs with its t interval, standard deviation and all values.

    A claim holds if it holds in every run, fails if it fails in any, and is undecided otherwise. The runs must be
    independent (different training seeds) and verified by the same checks; `n` is the number of runs.
    """
    if not runs:
        raise InvalidInput("aggregate was given no evidence; give the evidence of at least one run.")
    claims = [(finding.check, finding.claim) for finding in runs[0].findings]
    for number, run in enumerate(runs):
        other = [(finding.check, finding.claim) for finding in run.findings]
        different = sorted(set(claims) ^ set(other))
        if different or len(other) != len(claims):
            raise InvalidInput(
                f"run {number} does not make the same claims as run 0 ({len(other)} against {len(claims)}; the first "
                f"difference: {different[0] if different else 'one is made twice'}). Verify all by the same checks."
            )
    merged = tuple(_merge([_find(run, *claim) for run in runs]) for claim in claims)
    return Evidence(merged, {"runs": len(runs), **_shared([run.about for run in runs])})


def _find(run: Evidence, check: str, claim: str) -> Finding:
    return next(finding for finding in run.findings if (finding.check, finding.claim) == (check, claim))


def _merge(findings: list[Finding]) -> Finding:
    first = findings[0]
    values = [finding.value for finding in findings]
    several = len(values) > 1
    interval = t_interval(values) if several else None
    limits = {finding.limit for finding in findings}
    limit = first.limit if len(limits) == 1 else None
    return Finding(
        first.check,
        first.claim,
        fmean(values),
        first.unit,
        limit=limit,
        outcome=_outcome_of_all(findings) if limit is not None else REPORTED,
        low=interval.low if interval else first.low,
        high=interval.high if interval else first.high,
        n=len(values),
        details={
            "quantity": first.details.get("quantity"),
            "interval": "t over runs" if several else "of the one run",
            "deviation": stdev(values) if several else None,
            "runs": [
                {
                    "value": run.value,
                    "low": run.low,
                    "high": run.high,
                    "outcome": run.outcome,
                    "n": run.n,
                    "seed": run.seed,
                }
                for run in findings
            ],
        },
    )


def _outcome_of_all(findings: Sequence[Finding]) -> str:
    return Evidence(tuple(findings), {}).outcome


def _shared(abouts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the records: equal values are kept, different ones become a list with one entry per run."""
    names = dict.fromkeys(name for about in abouts for name in about)
    merged: dict[str, Any] = {}
    for name in names:
        values = [about.get(name) for about in abouts]
        merged[name] = values[0] if all(value == values[0] for value in values) else values
    return merged
