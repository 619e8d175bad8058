"""Uniform heads: removes the scores of heads whose attention is almost uniform."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read, read_spectrum, require_share
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class UniformHeads(Rule):
    """Removes all directions from heads of at most this `selectivity`; the heads are kept and output the mean value.

    Selectivity is 1 - row entropy / log(tokens), averaged over the calibration images. By Pinsker's inequality the rows
    of such a head are on average within sqrt(2 * selectivity * log(tokens)) of uniform in the 1-norm, which bounds the
    error on those images. Works for every form, dense included.
    """

    needs: ClassVar[tuple[str, ...]] = ("selectivity",)
    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    selectivity: float = 1e-3

    def __post_init__(self):
        require_share(self, "selectivity", self.selectivity)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_spectrum(self, diagnosis, layer)
        found = read(self, diagnosis, layer, "selectivity", per="head")
        keep = spectrum.used & (found > self.selectivity)[:, None]
        return keep_only(spectrum, keep, [f"selectivity {value:.2g}" for value in found.tolist()])
