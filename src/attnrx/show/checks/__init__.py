"""The checks, which compare a compressed model (the candidate) with its original (the reference).

Every check is a frozen dataclass with its settings (knobs) as fields. Calling a check returns its findings:

    comparison = Comparison(candidate, reference, splits.test, masked=masked, prescription=prescription)
    findings = [finding for check in standard_checks() for finding in check(comparison)]
"""

from attnrx.change.predictions import Predictions
from attnrx.show.checks.check import Check, Comparison, possible_checks, require_possible
from attnrx.show.checks.costs import Costs, Latency, Promises
from attnrx.show.checks.outputs import Accuracy, Calibration, Features, Fidelity, Index, Retrieval
from attnrx.support.errors import InvalidInput
from attnrx.support.registry import Registry
from attnrx.support.text_parsing import TextReader

CHECKS = Registry[type[Check]](
    "check", Accuracy, Fidelity, Calibration, Costs, Latency, Promises, Features, Retrieval, Index
)

__all__ = [
    "CHECKS", "Accuracy", "Calibration", "Check", "Comparison", "Costs", "Features", "Fidelity", "Index",
    "Latency", "Predictions", "Promises", "Retrieval", "parse_checks", "possible_checks", "require_possible",
    "standard_checks",
]  # fmt: skip


class _Reader(TextReader):
    noun, plural, signs = "list of checks", "Checks", "(),=/"
    examples = "accuracy,costs or accuracy,robustness(severities=3,corruptions=gaussian_noise/fog)"


def parse_checks(text: str) -> tuple[Check, ...]:
    """Returns the checks that a text names, e.g. `accuracy,robustness(severities=3,corruptions=common)`.

    Raises:
        InvalidInput: The text is not a list of checks, or names a check twice.
        UnknownName: The text names a check, or a setting of a check, that does not exist.
    """
    reader, requested = _Reader(text), dict[str, Check]()
    while not requested or reader.take(","):
        name, kind = reader.read_name(CHECKS)
        if name.text in requested:
            raise InvalidInput(f"the check {name.text} was given twice in {text!r}; give it once, with all its knobs.")
        requested[name.text] = reader.build(name, kind, reader.read_knobs(name, kind))
    reader.expect("end", "',' and another check, or the end")
    return tuple(requested.values())


def standard_checks() -> tuple[Check, ...]:
    """Returns the checks that `verify` runs if you request none, with their default settings."""
    return Accuracy(), Fidelity(), Calibration(), Costs(), Latency()
