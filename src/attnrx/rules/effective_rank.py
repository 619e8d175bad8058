"""Effective rank: keeps as many directions as the entropy of the spectrum indicates."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.diagnostics import spectral_shape
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.preconditions import read_learned_spectrum
from attnrx.rules.rule import Rule

ROUNDING = 1e-9  # exp(log(10)) is above 10 in floating point, and its ceiling must not be 11


@dataclass(frozen=True)
class EffectiveRank(Rule):
    """Keeps the strongest directions of each head, as many as its effective rank (Eq. 24), rounded up.

    A head whose strengths are all zero has effective rank 0 and keeps none, which does not change the model. Needs
    learned strengths.
    """

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        effective = spectral_shape.effective_rank(spectrum.strength.double(), spectrum.used)
        keep = largest(spectrum.strength.abs(), spectrum.used, (effective - ROUNDING).ceil().long())
        return keep_only(spectrum, keep, [f"effective rank {rank:.3g}" for rank in effective.tolist()])
