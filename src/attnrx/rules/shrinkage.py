"""Shrinkage: make every strength smaller by the same amount, and drop what reaches zero."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import give_strengths
from attnrx.rules.knobs import require_positive
from attnrx.rules.preconditions import read_learned_spectrum
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class Shrinkage(Rule):
    """Takes `amount` off every |strength| (the soft threshold); what reaches zero goes, and a head may keep none.

    Masked, no score moves by more than amount * scale (Theorem 1), as with Threshold, but no strength jumps.
    Needs learned strengths.
    """

    scores_only: ClassVar[bool] = True

    amount: float

    def __post_init__(self):
        require_positive(self, "amount", self.amount)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Shrinks every strength towards zero."""
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        before = spectrum.strength.double() * spectrum.used
        left = (before.abs() - self.amount).clamp(min=0)
        notes = [f"every strength shrunk by {self.amount:g}"] * before.shape[0]
        return give_strengths(spectrum, left > 0, left * before.sign(), notes)
