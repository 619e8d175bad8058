"""The contract of a check: a comparison in, findings out."""

from abc import ABC, abstractmethod
from dataclasses import is_dataclass
from typing import Any, ClassVar

from attnrx.checks.comparison import Comparison
from attnrx.config import to_dict
from attnrx.data import ImageSet
from attnrx.evidence import Finding


class Check(ABC):
    """One kind of evidence. Every check is a final frozen dataclass whose fields are its knobs.

    The claim of a finding never holds a measured number, so the same claim can be followed over several runs; the
    short name of what was measured stands in `details["quantity"]`.
    """

    name: ClassVar[str]
    on_request: ClassVar[bool] = False
    """Whether it must be requested by name: it needs an input of its own, or takes long."""

    needs_labels: ClassVar[bool] = False
    """Whether labels are compared with the answers, so that they must be numbers of the model's classes."""

    @abstractmethod
    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Measures the candidate against the reference."""

    def describe(self) -> dict[str, Any]:
        """The name and the knobs, for the record: of images their fingerprint; models and functions are left out."""
        knobs = {name: _plain(knob) for name, knob in vars(self).items()}
        return {"check": self.name, **{name: knob for name, knob in knobs.items() if knob is not None}}


def _plain(knob: Any) -> Any:
    if isinstance(knob, ImageSet):
        return knob.fingerprint
    if is_dataclass(knob):
        return to_dict(knob)
    if isinstance(knob, tuple):
        return list(knob)  # as JSON reads it back
    return knob if isinstance(knob, bool | int | float | str) else None
