"""The uniform control: as many directions in every layer, but the same number in every head."""

from dataclasses import dataclass

import torch

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import ScoreDecision
from attnrx.rules.decisions import keep_only
from attnrx.rules.knobs import require_rule
from attnrx.rules.preconditions import read_learned_spectrum, require_own_directions
from attnrx.rules.rule import Rule
from attnrx.rules.selection import largest, places
from attnrx.shapes import Bool, Int, Tensor
from attnrx.spectrum import Spectrum


@dataclass(frozen=True)
class UniformMatched(Rule):
    """Keeps as many directions of the layer as `rule` does: the strongest of each head, as many in all that stay.

    Where the number cannot be divided, the heads whose next direction is strongest keep one more; a head that
    has no more directions passes its part on. It shows what choosing a rank per head is worth. Strengths stay
    as they were. Needs learned strengths.
    """

    rule: Rule

    def __post_init__(self):
        require_rule(self, self.rule)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        """Deals the layer's directions out evenly."""
        spectrum, matched = read_learned_spectrum(self, diagnosis, layer), self.rule.decide(diagnosis, layer)
        require_own_directions(self, spectrum, matched)
        ranks = _even_ranks(spectrum, matched.heads, sum(matched.ranks))
        keep = largest(spectrum.strength.abs(), spectrum.used, ranks)
        return keep_only(spectrum, keep, ["the same rank in every head"] * len(spectrum.heads), matched.heads)


def _even_ranks(spectrum: Spectrum, heads: Bool[Tensor, "heads"], total: int) -> Int[Tensor, "heads"]:
    """Deals out directions in rounds, each head's strongest first and within a round the strongest head first."""
    strength, used = spectrum.strength.abs(), spectrum.used & heads[:, None]
    rounds = places(strength, used)
    dealt = [
        (rounds[head, direction].item(), -strength[head, direction].item(), head)
        for head, direction in torch.nonzero(used).tolist()
    ]
    ranks = torch.zeros(len(heads), dtype=torch.long)
    for _, _, head in sorted(dealt)[:total]:
        ranks[head] += 1
    return ranks
