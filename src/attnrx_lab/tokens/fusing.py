"""Reducers that fuse pruned patches into the others: SPViT and dTPS."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from attnrx.support.shapes import Tensor
from attnrx.vit.tokens import (
    DynamicViT,
    EViT,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    Soft,
    TokenState,
    destinations_of,
    gathered_rows,
)
from attnrx.vit.tokens.reducer import KeepDrop, PerPatch, best
from attnrx_lab.tokens.scores import HeadSelector


@dataclass(frozen=True)
class SPViT(EViT):
    """Keeps the patches of the highest scores and fuses the others, weighted by their probability of keep (Kong et al.,
    2022).

    `scores` is the paper's selector, or SPOT's predictor as in SPOT's Table 3, or any selecting reducer. The paper also
    searches the layers of the stages by latency; here they are the policy's.
    """

    scores: Selecting = field(default=HeadSelector())


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
        cosines = unit @ gathered_rows(unit, kept).transpose(1, 2)  # [batch, patches, hosts]
        tokens = _squeezed(state.patches, gathered_rows(state.patches, kept), cosines, pruned_mask)
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
