"""Uniform heads: where a head attends to everything alike, its scores are computed for nothing."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.knobs import require_share
from attnrx.rules.preconditions import read, read_spectrum
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class UniformHeads(Rule):
    """Takes all directions from heads of at most this `selectivity`; they stay and output the mean value.

    Selectivity is 1 - row entropy / log(tokens), a mean over the calibration images. By Pinsker's inequality
    the rows of such a head are on average within sqrt(2 * selectivity * log(tokens)) of uniform in the 1-norm,
    which bounds what is lost on those images. It works for every form, dense included.
    """

    needs: ClassVar[tuple[str, ...]] = ("selectivity",)
    scores_only: ClassVar[bool] = True

    selectivity: float = 1e-3

    def __post_init__(self):
        require_share(self, "selectivity", self.selectivity)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Compares every head's selectivity with the limit."""
        spectrum = read_spectrum(self, diagnosis, layer)
        found = read(self, diagnosis, layer, "selectivity", per="head")
        keep = spectrum.used & (found > self.selectivity)[:, None]
        return keep_only(spectrum, keep, [f"selectivity {value:.2g}" for value in found.tolist()])
