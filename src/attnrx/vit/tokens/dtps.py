"""dTPS: fuses every pruned patch into the most similar kept patch."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.support.shapes import Tensor
from attnrx.vit.tokens.dynamicvit import DynamicViT
from attnrx.vit.tokens.reducer import (
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
from attnrx.vit.tokens.soft import Soft
from attnrx.vit.tokens.state import TokenState


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
        kept = best(self.scores.relevance(state, predictor), state.present_mask, count)
        # 1 for the patches that this stage prunes; 0 for kept ones and for those pruned by an earlier stage.
        pruned_mask = state.present_mask.scatter(1, kept, 0.0)
        unit = nn.functional.normalize(state.patches, dim=-1)
        cosines = unit @ taken(unit, kept).transpose(1, 2)  # [batch, patches, hosts]
        tokens = _squeezed(state.patches, taken(state.patches, kept), cosines, pruned_mask)
        destinations = destinations_of(kept, cosines.argmax(-1)) if state.tracked else None
        return Reduction(kept, tokens, destinations=destinations)

    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Fuses every pruned patch into the most similar kept one; every patch keeps its index."""
        unit = nn.functional.normalize(state.patches, dim=-1)
        # All patches are in the table of hosts, so that shapes do not depend on the sample; pruned ones are masked.
        cosines = (unit @ unit.transpose(1, 2)).masked_fill(keep[:, None, :] == 0, float("-inf"))
        # The choice of the host has no gradient; the sample has one, by the weight 1 - keep of a fused patch.
        return SampledTokens(_squeezed(state.patches, state.patches, cosines, state.present_mask * (1 - keep)))


def _squeezed(patches: Tensor, hosts: Tensor, cosines: Tensor, pruned_mask: Tensor) -> Tensor:
    """Returns the host patches with the pruned patches (1 in `pruned_mask`, others 0) fused into them.

    `hosts` is [batch, hosts, width]; `cosines` [batch, patches, hosts] is the cosine similarity of patches and hosts.
    """
    similarity, host = cosines.max(-1)
    # Under autocast the products have a lower precision than the patches, and scatter_add needs one dtype.
    weights = similarity.to(patches.dtype).exp() * pruned_mask
    # A kept patch has the similarity 1 to itself, so the weight e.
    total = torch.full_like(hosts[..., 0], math.e).scatter_add(1, host, weights)
    weighted_sum = (hosts * math.e).scatter_add(1, host[..., None].expand_as(patches), patches * weights[..., None])
    return weighted_sum / total[..., None]
