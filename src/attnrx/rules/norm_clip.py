"""Norm clip: caps the largest strengths, so that the scores are less sensitive to perturbed inputs."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import give_strengths
from attnrx.rules.preconditions import read_learned_spectrum, require_positive
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class NormClip(Rule):
    """Caps |strength| at `limit` and keeps every direction: spectral smoothing.

    The limit is absolute, like the bound that it gives: the Lipschitz constant from queries and keys to the scores
    (Proposition 4) becomes at most limit * scale. Needs learned strengths.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    limit: float

    def __post_init__(self):
        require_positive(self, "limit", self.limit)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        before = spectrum.strength.double() * spectrum.used
        return give_strengths(spectrum, spectrum.used, before.clamp(-self.limit, self.limit), self._notes(before))

    def _notes(self, before: Float[Tensor, "heads directions"]) -> list[str]:
        notes = []
        for strengths in before.abs():
            capped = int((strengths > self.limit).sum())
            top = strengths.max().item()
            notes.append(
                f"{capped} of them capped at {self.limit:g}, the largest was {top:.3g}"
                if capped
                else f"none above {self.limit:g}, the largest is {top:.3g}"
            )
        return notes
