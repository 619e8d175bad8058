"""Checks compare a candidate with its reference and return findings. Each is a frozen dataclass of knobs.

comparison = Comparison(candidate, reference, splits.test, masked=masked, prescription=prescription)
findings = [finding for check in standard() for finding in check(comparison)]
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from attnrx.change.predictions import Predictions
from attnrx.show.checks.check import Check, Comparison, possible_checks, require_possible
from attnrx.show.checks.costs import Costs, Latency, Promises
from attnrx.show.checks.outputs import Accuracy, Calibration, Features, Fidelity, Retrieval
from attnrx.support.errors import InvalidInput
from attnrx.support.text_parsing import Registry, TextReader

CHECKS = Registry[Check]("check", Accuracy, Fidelity, Calibration, Costs, Latency, Promises, Features, Retrieval)
register_check = CHECKS.register

__all__ = [
    "CHECKS", "Accuracy", "Calibration", "Check", "Comparison", "Costs", "Features", "Fidelity", "Latency",
    "Predictions", "Promises", "Retrieval", "all_checks", "parse_checks", "possible_checks", "register_check",
    "require_possible", "standard_checks",
]  # fmt: skip


@cache
def all_checks() -> Mapping[str, type[Check]]:
    """Returns CHECKS, with those of other packages (entry points of the group `attnrx.checks`), by name."""
    for entry in entry_points(group="attnrx.checks"):
        CHECKS.register(entry.load(), entry.name)
    return CHECKS


class _Reader(TextReader):
    noun, plural, signs = "list of checks", "Checks", "(),=/"
    examples = "accuracy,costs or accuracy,robustness(severities=3,corruptions=gaussian_noise/fog)"


def parse_checks(text: str) -> tuple[Check, ...]:
    """Returns the checks of a text, each given once, e.g. `accuracy,robustness(severities=3,corruptions=common)`.

    Raises:
        InvalidInput: The text has another form, or a check is given twice.
        UnknownName: There is no such check or knob.
    """
    reader, requested = _Reader(text), dict[str, Check]()
    while not requested or reader.take(","):
        name, kind = reader.read_name(all_checks(), "check")
        if name.text in requested:
            raise InvalidInput(f"the check {name.text} was given twice in {text!r}; give it once, with all its knobs.")
        requested[name.text] = reader.build(name, kind, reader.read_knobs(name, kind))
    reader.expect("end", "',' and another check, or the end")
    return tuple(requested.values())


def standard_checks() -> tuple[Check, ...]:
    """Returns the checks that do not need to be requested, with their defaults."""
    return Accuracy(), Fidelity(), Calibration(), Costs(), Latency()
