"""Contribution energy: ranks directions by their contribution to the scores on data instead of their strength alone."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import fewest_holding, keep_only
from attnrx.rules.preconditions import read, read_spectrum, require_share
from attnrx.rules.rule import Rule
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class ContributionEnergy(Rule):
    """Keeps the fewest directions of each head that hold the share rho of its contribution energy.

    The contribution of a direction is strength^2 * query_moment * key_moment: the mean square of its term in the
    scores. The keys are centred over the tokens of an image, because the softmax cancels constants along a row. Ties
    and extremes are those of EnergyRetention. Works for every form, dense included. There is no bound on the error:
    terms of different directions may cancel.
    """

    needs: ClassVar[tuple[str, ...]] = ("query_moment", "key_moment")
    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    rho: float

    def __post_init__(self):
        require_share(self, "rho", self.rho)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_spectrum(self, diagnosis, layer)
        moments = [read(self, diagnosis, layer, name, per="direction") for name in self.needs]
        if any(bool((moment < 0).any()) for moment in moments):
            raise InvalidInput(f"{self} found a negative second moment in layer {layer}; diagnose the model again.")
        amount = spectrum.strength.double().square() * moments[0] * moments[1]
        keep = fewest_holding(self.rho, amount, spectrum.used)
        return keep_only(spectrum, keep, _notes(amount * spectrum.used, amount * (keep & spectrum.used)))


def _notes(amount: Float[Tensor, "heads directions"], kept: Float[Tensor, "heads directions"]) -> list[str]:
    shares = zip(amount.sum(-1).tolist(), kept.sum(-1).tolist(), strict=True)
    return [f"{100 * part / whole:.1f} % of the contribution" if whole else "no contribution" for whole, part in shares]
