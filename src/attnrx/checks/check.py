"""The base class of checks, which map a comparison to findings."""

from abc import ABC, abstractmethod
from dataclasses import is_dataclass
from typing import Any, ClassVar

from attnrx.checks.comparison import Comparison
from attnrx.data import ImageSet
from attnrx.evidence import Finding
from attnrx.serialization.config import to_dict


class Check(ABC):
    """One kind of evidence. Every check is a final frozen dataclass whose fields are its knobs.

    The claim of a finding contains no measured number, so that the same claim can be compared over several runs;
    `details["quantity"]` is the short name of the measured quantity.
    """

    name: ClassVar[str]
    on_request: ClassVar[bool] = False
    """Whether the check runs only if it is requested by name: it needs its own input, or takes long."""

    needs_labels: ClassVar[bool] = False
    """Whether the check compares labels with predictions, so that labels must be class indices of the model."""

    @abstractmethod
    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Measures the candidate against the reference."""

    def describe(self) -> dict[str, Any]:
        """Returns the name and the knobs for the record: image sets as fingerprints, without models and functions."""
        knobs = {name: _plain(knob) for name, knob in vars(self).items()}
        return {"check": self.name, **{name: knob for name, knob in knobs.items() if knob is not None}}


def _plain(knob: Any) -> Any:
    if isinstance(knob, ImageSet):
        return knob.fingerprint
    if is_dataclass(knob):
        return to_dict(knob)
    if isinstance(knob, tuple):
        return list(knob)  # JSON has no tuples
    return knob if isinstance(knob, bool | int | float | str) else None
