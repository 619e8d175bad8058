"""dTPS: fuses every pruned patch into the most similar kept patch."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.shapes import Tensor
from attnrx.tokens.dynamicvit import DynamicViT
from attnrx.tokens.reducer import (
    KeepDrop,
    PerPatch,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    best,
    destinations_of,
    taken,
)
from attnrx.tokens.soft import Soft
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class DTPS(Soft):
    """Keeps the patches of the highest scores, and fuses every other one into the most similar kept one (Wei et al.,
    2023).

    Similarity is the cosine c of two tokens. A kept patch becomes the mean of itself and of those matched to it,
    weighted by exp(c); its own weight is exp(1). Attention counts it once. `scores` is DynamicViT's predictor (dTPS),
    class attention (eTPS, but before a layer instead of inside it), SPOT's, or any selecting reducer.
    """

    scores: Selecting = field(default=DynamicViT())

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor of the scores, and of the similarities between all and the kept patches."""
        return super().predictor_macs(shape, patches, count) + patches * count * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        kept = best(self.scores.relevance(state, predictor), state.there, count)
        pruned_mask = state.there.scatter(1, kept, 0.0)
        unit = nn.functional.normalize(state.patches, dim=-1)
        alike = unit @ taken(unit, kept).transpose(1, 2)
        tokens = _squeezed(state.patches, taken(state.patches, kept), alike, pruned_mask)
        destinations = destinations_of(kept, alike.argmax(-1)) if state.tracked else None
        return Reduction(kept, tokens, destinations=destinations)

    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Fuses every pruned patch into the most similar kept one; every patch keeps its index."""
        unit = nn.functional.normalize(state.patches, dim=-1)
        alike = (unit @ unit.transpose(1, 2)).masked_fill(keep[:, None, :] == 0, float("-inf"))
        return SampledTokens(_squeezed(state.patches, state.patches, alike, state.there * (1 - keep)))


def _squeezed(patches: Tensor, own: Tensor, alike: Tensor, pruned_mask: Tensor) -> Tensor:
    """Returns the host patches with the pruned patches (1 in `pruned_mask`, others 0) fused into them.

    `own` [batch, hosts, width] are the hosts; `alike` [batch, patches, hosts] is the cosine similarity of patches and
    hosts.
    """
    similarity, host = alike.max(-1)
    weights = similarity.to(patches.dtype).exp() * pruned_mask
    # A kept patch has the similarity 1 to itself, so the weight e.
    total = torch.full_like(own[..., 0], math.e).scatter_add(1, host, weights)
    weighted_sum = (own * math.e).scatter_add(1, host[..., None].expand_as(patches), patches * weights[..., None])
    return weighted_sum / total[..., None]
