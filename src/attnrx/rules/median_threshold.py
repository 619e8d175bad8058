"""Median threshold: the optimal hard threshold for singular values in noise."""

from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.preconditions import read_learned_spectrum, require_positive
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class MedianThreshold(Rule):
    """Keeps the directions whose |strength| is above `factor` times the median of its head (Gavish and Donoho, 2014).

    For a square matrix of low rank plus white noise of unknown level, 2.858 times the median singular value is the
    threshold of the least asymptotic mean squared error. No knob has to be tuned. A head whose spectrum decays slowly
    keeps no direction. Needs learned strengths, or a `metric`.
    """

    factor: float = 2.858

    def __post_init__(self):
        require_positive(self, "factor", self.factor)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        strength = spectrum.strength.double().abs()
        median = strength.where(spectrum.used, torch.nan).nanquantile(0.5, dim=1, keepdim=True)
        reasons = [f"above {self.factor:g} times the median {each:.3g}" for each in median.flatten().tolist()]
        return keep_only(spectrum, spectrum.used & (strength > self.factor * median), reasons)
