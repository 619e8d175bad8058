"""Checks compare a candidate with its reference and return findings. Each is a frozen dataclass of knobs.

comparison = Comparison(candidate, reference, splits.test, masked=masked, prescription=prescription)
findings = [finding for check in standard() for finding in check(comparison)]
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from attnrx.change.predictions import Predictions
from attnrx.show.checks.accuracy import Accuracy
from attnrx.show.checks.calibration import Calibration
from attnrx.show.checks.check import Check, RequestedCheck, parse_checks_text, possible_checks, require_possible
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.controls import Controls
from attnrx.show.checks.costs import Costs
from attnrx.show.checks.dense import Features
from attnrx.show.checks.fidelity import Fidelity
from attnrx.show.checks.latency import Latency
from attnrx.show.checks.promises import Promises
from attnrx.show.checks.retrieval import Retrieval

CHECKS: dict[str, type[Check]] = {
    check.name: check
    for check in (
        Accuracy,
        Fidelity,
        Calibration,
        Costs,
        Latency,
        Controls,
        Promises,
        Features,
        Retrieval,
    )
}

__all__ = [
    "CHECKS",
    "Accuracy",
    "Calibration",
    "Check",
    "Comparison",
    "Controls",
    "Costs",
    "Features",
    "Fidelity",
    "Latency",
    "Predictions",
    "Promises",
    "RequestedCheck",
    "Retrieval",
    "all_checks",
    "parse_checks",
    "possible_checks",
    "require_possible",
    "standard_checks",
]


@cache
def all_checks() -> Mapping[str, type[Check]]:
    """Returns CHECKS and the checks of other packages (entry points of the group `attnrx.checks`) by name."""
    return CHECKS | {entry.name: entry.load() for entry in entry_points(group="attnrx.checks")}


def parse_checks(text: str) -> tuple[RequestedCheck, ...]:
    """Parses checks with their knobs, e.g. `accuracy,robustness(severities=3,corruptions=common)`."""
    return parse_checks_text(text, all_checks())


def standard_checks() -> tuple[Check, ...]:
    """Returns the checks that do not need to be requested, with their defaults."""
    return tuple(check() for check in CHECKS.values() if not check.on_request)
