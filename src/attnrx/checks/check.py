"""The contract of a check: a comparison in, findings out."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from attnrx.checks.comparison import Comparison
from attnrx.evidence import Finding


class Check(ABC):
    """One kind of evidence. Every check is a final frozen dataclass whose fields are its knobs.

    The claim of a finding never holds a measured number, so the same claim can be followed over several runs; the short name of
    what was measured stands in `details["quantity"]`.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Measures the candidate against the reference."""

    def describe(self) -> dict[str, Any]:
        """The name and the knobs, for the record; models and functions among the fields are left out."""
        plain = {name: knob for name, knob in vars(self).items() if isinstance(knob, bool | int | float | str | tuple)}
        return {"check": self.name, **plain}
