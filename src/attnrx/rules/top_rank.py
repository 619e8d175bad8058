"""Top rank: keeps the same number of directions of every head."""

from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest
from attnrx.rules.preconditions import read_learned_spectrum, require_count
from attnrx.rules.rule import Rule


@dataclass(frozen=True)
class TopRank(Rule):
    """Keeps the `rank` strongest directions of each head, or all where a head has fewer; ties are resolved by index.

    Of all sets of that size it minimizes the bound of Theorem 1 on the masked scores. Needs learned strengths.
    """

    rank: int

    def __post_init__(self):
        require_count(self, "rank", self.rank)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = read_learned_spectrum(self, diagnosis, layer)
        ranks = torch.full((spectrum.strength.shape[0],), self.rank)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks))
