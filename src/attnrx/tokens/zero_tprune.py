"""Zero-TPrune: importance by page rank on the graph of attention, and patches that are alike, without training."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.reducer import Reducer, Reduction, Shape, best, taken
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class ZeroTPrune(Reducer):
    """Drops patches that are like more important ones, then the least important (Wang et al., 2024), untrained.

    Importance: the attention of the layer before is a graph, and `iterations` steps of page rank on it, begun with all
    tokens alike, give every token a score in every head. Heads whose scores vary too little or too much are left out
    (variance over the patches, of scores scaled to a mean of 1, below `least` or above `most`; all count where none is
    left), and the others join in their quadratic mean, which emphasizes what some heads find informative. A stage ranks
    once to divide the patches into a less important half and the rest; of the half, those leave that are most similar
    to one of the rest (cosine of the mean keys over the heads): `similar` of all that leave, as many as the half has
    at most. It ranks what is left once more, and the least important leave.

    The steps are the paper's I'-S-I; the scale of the variance, the share `similar` and one number of iterations for
    all stages (the paper takes fewer in deeper layers) are this package's. The class token is a token like others.
    """

    iterations: int = 30
    similar: float = 0.5
    least: float = 0.01
    most: float = 0.7

    def __post_init__(self):
        if self.iterations < 1 or not 0 <= self.similar <= 1 or not 0 <= self.least < self.most:
            raise InvalidInput(
                f"{self}: give at least one iteration, a share `similar` in [0, 1], and variances 0 <= least < most."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("attention", "keys")

    def importance(
        self, attention: Float[Tensor, "batch heads tokens tokens"], there: Float[Tensor, "batch tokens"], prefix: int
    ) -> Float[Tensor, "batch patches"]:
        """Scores the patches among the tokens that are `there` (1, others 0)."""
        found, patches = page_rank(attention, there, self.iterations)[:, :, prefix:], there[:, None, prefix:]
        count = patches.sum(2, keepdim=True)
        scaled = found / (found.sum(2, keepdim=True) / count).clamp_min(torch.finfo(attention.dtype).tiny)
        variance = ((scaled - 1).square() * patches).sum(2) / count[..., 0]
        counted = ((variance >= self.least) & (variance <= self.most)).to(found.dtype)
        counted = torch.where(counted.sum(1, keepdim=True) > 0, counted, 1.0)
        return ((found.square() * counted[..., None]).sum(1) / counted.sum(1, keepdim=True)).sqrt()

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of comparing the less important half with the rest by their keys, where likeness decides at all."""
        half = patches // 2
        return half * (patches - half) * shape.directions if self._alike(patches, count) else 0

    def _alike(self, present: int, count: int) -> int:
        """The patches that leave because another is like them."""
        return min(int(self.similar * (present - count)), present // 2)

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Drops until `count` are left."""
        assert state.attention is not None
        assert state.keys is not None
        present = state.present
        alike = self._alike(present, count)
        there = (state.sizes > 0).to(state.attention.dtype)
        if alike:
            first = self.importance(state.attention, there, state.prefix)
            gone = redundant(state.keys[:, state.prefix :], first, there[:, state.prefix :], present, alike)
            there = there.scatter(1, state.prefix + gone, 0.0)
        relevance = self.importance(state.attention, there, state.prefix)
        kept = best(relevance, there[:, state.prefix :], count)
        return Reduction(kept, taken(state.patches, kept))


def page_rank(
    attention: Float[Tensor, "batch heads tokens tokens"], there: Float[Tensor, "batch tokens"], iterations: int
) -> Float[Tensor, "batch heads tokens"]:
    """Returns what every token that is there gets when all give their score on as they attend, so many times.

    Attention to tokens that are not there is left out and the rest of the row made a sum of 1; scores sum to 1.
    """
    steps = attention * there[:, None, None, :]
    steps = steps / steps.sum(3, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)
    found = (there / there.sum(1, keepdim=True))[:, None, None, :].expand(-1, attention.shape[1], -1, -1)
    for _ in range(iterations):
        found = (found.transpose(2, 3) * steps).sum(2, keepdim=True)
    return found[:, :, 0]


def redundant(
    keys: Float[Tensor, "batch patches directions"],
    importance: Float[Tensor, "batch patches"],
    there: Float[Tensor, "batch patches"],
    present: int,
    count: int,
) -> Int[Tensor, "batch gone"]:
    """Returns the `count` patches of the less important half of those `present` that are most like one of the rest."""
    order = importance.masked_fill(there == 0, float("-inf")).argsort(dim=1, descending=True, stable=True)
    high, low = order[:, : present - present // 2], order[:, present - present // 2 : present]
    unit = nn.functional.normalize(keys, dim=-1)
    closeness = (taken(unit, low) @ taken(unit, high).transpose(1, 2)).amax(-1)
    return low.gather(1, closeness.argsort(dim=1, descending=True, stable=True)[:, :count])
