"""Energy retention: keeps the strongest directions of each head until they hold a given share of its energy."""

from dataclasses import dataclass

from attnrx.diagnosis import Diagnosis
from attnrx.diagnostics.spectral_shape import energy
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import fewest_holding, keep_only
from attnrx.rules.preconditions import read_learned_spectrum, require_share
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class EnergyRetention(Rule):
    """Keeps the fewest directions of each head whose energy reaches the retention ratio rho (Eqs. 44 and 45).

    Ties are resolved by index. At least one direction is kept, and rho = 1 keeps all that are not zero. The removed
    energy is at most 1 - rho of the head's, so no masked score changes by more than sqrt(1 - rho) * norm(strength) *
    scale. Needs learned strengths.
    """

    rho: float

    def __post_init__(self):
        require_share(self, "rho", self.rho)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        shares = energy(spectrum.strength.double(), spectrum.used)
        return keep_only(spectrum, fewest_holding(self.rho, shares, spectrum.used))
