"""Threshold: removes directions with small strength."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read_learned_spectrum, require_positive
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class Threshold(Rule):
    """Keeps the directions with |strength| >= tau (Eqs. 8-10); a head may keep none.

    No masked score changes by more than tau * scale (Theorem 1, Eq. 13). Needs learned strengths.
    """

    tau: float

    def __post_init__(self):
        require_positive(self, "tau", self.tau)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        return keep_only(spectrum, spectrum.strength.double().abs() >= self.tau)
