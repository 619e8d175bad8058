"""Measures: the numbers of one candidate, by name, read off its evidence."""

from collections.abc import Mapping
from typing import Any

from attnrx.evidence import Evidence, Finding

Measure = dict[str, Any]  # value, low, high, and other fields of the finding

ROLES = {"reference": "original", "masked": "masked"}


def measures(evidence: Evidence) -> dict[str, Measure]:
    """Returns every number that a table may use, by name; other findings are skipped."""
    named = ((_name(finding), finding) for finding in evidence.findings)
    return {name: _measure(finding) for name, finding in named if name is not None}


def plain_measure(value: float) -> Measure:
    """Returns an exact number, which has no interval."""
    return {"value": value, "low": None, "high": None}


def _measure(finding: Finding) -> Measure:
    kept = ("lost", "gained", "mcnemar_p", "draws", "deviation", "p", "candidate", "control")
    more = {name: finding.details[name] for name in kept if name in finding.details}
    return {"value": finding.value, "low": finding.low, "high": finding.high, "n": finding.n, **more}


def _name(finding: Finding) -> str | None:
    if finding.check not in NAMES:
        return None
    return NAMES[finding.check](finding.details)


def _accuracy(details: Mapping[str, Any]) -> str | None:
    if details["quantity"] == "accuracy change":
        return "accuracy_change"
    return "accuracy" if details["model"] == "candidate" else "original_accuracy"


def _fidelity(details: Mapping[str, Any]) -> str | None:
    # The masked model is measured as a candidate of its own.
    return f"{details['quantity']}_to_{ROLES[details['base']]}" if details["other"] == "candidate" else None


def _costs(details: Mapping[str, Any]) -> str | None:
    return {"parameters": "params_down", "MACs": "macs_down"}.get(details["quantity"])


def _controls(details: Mapping[str, Any]) -> str | None:
    better = {"discrepancy": "nearer", "accuracy": "more_accurate"}[details["quantity"]]
    return f"{better}_than_{details['kind']}"


NAMES = {"accuracy": _accuracy, "fidelity": _fidelity, "costs": _costs, "controls": _controls}
