"""Shrinkage: reduces every strength by the same amount, and removes directions that reach zero."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import give_strengths
from attnrx.rules.preconditions import read_learned_spectrum, require_positive
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class Shrinkage(Rule):
    """Subtracts `amount` from every |strength| (soft threshold); removes directions that reach zero; a head may keep
    none.

    No masked score changes by more than amount * scale (Theorem 1), as with Threshold, but strengths change
    continuously. Needs learned strengths.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    amount: float

    def __post_init__(self):
        require_positive(self, "amount", self.amount)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        before = spectrum.strength.double() * spectrum.used
        magnitude = (before.abs() - self.amount).clamp(min=0)
        notes = [f"every strength shrunk by {self.amount:g}"] * before.shape[0]
        return give_strengths(spectrum, magnitude > 0, magnitude * before.sign(), notes)
