"""The uniform control: keeps the same number of directions of every layer, evenly distributed over the heads."""

from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only, largest, rank_positions
from attnrx.rules.preconditions import read_learned_spectrum, require_own_directions, require_rule
from attnrx.rules.rule import Rule
from attnrx.shapes import Int, Tensor
from attnrx.spectrum import Spectrum


@dataclass(frozen=True)
class UniformMatched(Rule):
    """Keeps as many directions of the layer as `rule` does: the strongest of each head, the same number in all.

    A remainder goes to the heads whose next direction is strongest; the part of a head without further directions goes
    to the others. The control measures the benefit of choosing a rank per head. Strengths do not change. Needs learned
    strengths.
    """

    rule: Rule

    def __post_init__(self):
        require_rule(self, self.rule)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = read_learned_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        require_own_directions(self, spectrum, matched)
        ranks = _even_ranks(spectrum, sum(matched.ranks))
        keep = largest(spectrum.strength.abs(), spectrum.used, ranks)
        return keep_only(spectrum, keep, ["the same rank in every head"] * len(spectrum.heads))


def _even_ranks(spectrum: Spectrum, total: int) -> Int[Tensor, "heads"]:
    """Distributes directions in rounds, each head's strongest first and within a round the strongest head first."""
    strength, used = spectrum.strength.abs(), spectrum.used
    rounds = rank_positions(strength, used)
    candidates = [
        (rounds[head, direction].item(), -strength[head, direction].item(), head)
        for head, direction in torch.nonzero(used).tolist()
    ]
    ranks = torch.zeros(len(used), dtype=torch.long)
    for _, _, head in sorted(candidates)[:total]:
        ranks[head] += 1
    return ranks
