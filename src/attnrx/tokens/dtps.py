"""dTPS: every patch that leaves is squeezed into the patch it is most like."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.dynamicvit import DynamicViT
from attnrx.tokens.reducer import Reduction, SampledTokens, Selecting, Shape, best, taken
from attnrx.tokens.soft import Soft
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class DTPS(Soft):
    """Keeps what the scores say, and squeezes every other patch into the kept one it is most like (Wei et al., 2023).

    Alike is the cosine c of two tokens. A kept patch becomes the mean of itself and of those matched to it, weighted by
    exp(c); its own weight is exp(1). Attention counts it once. `scores` is DynamicViT's predictor (dTPS), class
    attention (eTPS, but before a layer rather than inside it), SPOT's, or any selecting reducer.
    """

    scores: Selecting = field(default_factory=DynamicViT)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of the predictor of the scores, and of comparing every patch with those that are kept."""
        return super().predictor_macs(shape, patches, count) + patches * count * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the best and squeezes the rest into them."""
        kept = best(self.scores.relevance(state, predictor), state.there, count)
        num_pruned = state.there.scatter(1, kept, 0.0)
        unit = nn.functional.normalize(state.patches, dim=-1)
        alike = unit @ taken(unit, kept).transpose(1, 2)
        return Reduction(kept, squeezed(state.patches, taken(state.patches, kept), alike, num_pruned))

    def sampled(
        self, state: TokenState, keep: Float[Tensor, "batch patches"], scores: Float[Tensor, "batch patches 2"]
    ) -> SampledTokens:
        """Squeezes every patch that leaves into the nearest of those that stay, each of them in its place."""
        unit = nn.functional.normalize(state.patches, dim=-1)
        alike = (unit @ unit.transpose(1, 2)).masked_fill(keep[:, None, :] == 0, float("-inf"))
        return SampledTokens(squeezed(state.patches, state.patches, alike, state.there * (1 - keep)))


def squeezed(patches: Tensor, own: Tensor, alike: Tensor, num_pruned: Tensor) -> Tensor:
    """Returns the hosts with those patches that are `num_pruned` (1, others 0) in them.

    `own` [batch, hosts, width] are the hosts and `alike` [batch, patches, hosts] the cosines of every patch and each.
    """
    closeness, host = alike.max(-1)
    weights = closeness.to(patches.dtype).exp() * num_pruned
    total = torch.full_like(own[..., 0], math.e).scatter_add(1, host, weights)
    brought = (own * math.e).scatter_add(1, host[..., None].expand_as(patches), patches * weights[..., None])
    return brought / total[..., None]
