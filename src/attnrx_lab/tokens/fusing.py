"""Soft reducers, which select patches by another reducer's scores and fuse the pruned patches: EViT, SPViT and dTPS."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.tokens import (
    ClassAttention,
    LayerStatistic,
    Reducer,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    TokenState,
    destinations_of,
    gathered_rows,
)
from attnrx.vit.tokens.reducer import PerPatch, best
from attnrx_lab.tokens.learned_scores import DynamicViT, KeepDrop, Predicting, odds
from attnrx_lab.tokens.scores import HeadSelector


@dataclass(frozen=True)
class Soft(Reducer):
    """A reducer that ranks patches by the scores of another reducer, `scores`, and fuses the pruned patches.

    `scores` is any selecting reducer. The soft reducer also uses the layer statistics and the predictor of `scores`.
    """

    scores: Selecting

    def __post_init__(self):
        if not isinstance(self.scores, Selecting):
            name, scores_name = type(self).__name__, type(self.scores).__name__
            raise InvalidInput(
                f"{name} uses the scores of another reducer, and {scores_name} gives no scores; "
                "give e.g. DynamicViT, Spot or ClassAttention."
            )
        super().__post_init__()
        # A soft reducer needs the same inputs as the reducer in `scores`.
        for name in ("needs", "every_layer", "learned", "one_predictor"):
            object.__setattr__(self, name, getattr(self.scores, name))

    @property
    def untrained_reason(self) -> str | None:
        return self.scores.untrained_reason

    def predictor(self, shape: Shape) -> nn.Module:
        return self.scores.predictor(shape)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor that computes the scores."""
        return self.scores.predictor_macs(shape, patches, count)

    def sample(self, state: TokenState, predictor: nn.Module) -> SampledTokens:
        if not isinstance(self.scores, Predicting):
            return super().sample(state, predictor)
        return self.sampled(state, *self.scores.sampled_mask(state, predictor, self.extra > 0))

    @abstractmethod
    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Returns the tokens of a training step for the mask `keep`, which was sampled from the scores."""

    def add_layer(self, before: Any, observed: Float[Tensor, "batch *sizes"]) -> LayerStatistic:
        return self.scores.add_layer(before, observed)

    def image_keys(self, images: Float[Tensor, "batch channels height width"]) -> Int[Tensor, "batch"] | None:
        return self.scores.image_keys(images)


@dataclass(frozen=True)
class EViT(Soft):
    """Keeps the patches with the highest class attention, and fuses the others into one token (Liang et al., 2022).

    EViT appends the fused token to the `count` kept patches, and later stages treat this token as a patch. It is the
    mean of the other patches, weighted by their class attention. The mean has the magnitude of a patch, which matters
    if the model was not trained with fused tokens. The paper uses the plain sum of class attention times patch
    (`normalized=false`). The paper prunes between the attention and the MLP of a layer, but attnrx runs every reducer
    before a layer. Other `scores` can replace class attention.
    """

    name: ClassVar[str] = "evit"
    scores: Selecting = field(default=ClassAttention())
    normalized: bool = True

    extra: ClassVar[int] = 1

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor that computes the scores, plus the MACs of computing the fused token."""
        return super().predictor_macs(shape, patches, count) + patches * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        relevance = self.scores.relevance(state, predictor)
        kept = best(relevance, state.present_mask, count)
        # Only patches that this stage prunes are fused, not kept patches or patches that an earlier stage pruned.
        weights = self.scores.weights(relevance).masked_fill(state.present_mask == 0, 0.0).scatter(1, kept, 0.0)
        # The fused token follows the `count` kept patches, and represents all other patches.
        fused_index = torch.full_like(state.patch_indices, count)
        destinations = destinations_of(kept, fused_index) if state.tracked else None
        tokens, fused_token = gathered_rows(state.patches, kept), _fused(state.patches, weights, self.normalized)
        return Reduction(kept, tokens, fused_token, destinations=destinations)

    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Returns the tokens of a training step. The fused token overwrites the first pruned patch."""
        pruned_mask = state.present_mask * (1 - keep)
        fused_token = _fused(state.patches, self.scores.weights(odds(scores)) * pruned_mask, self.normalized)
        # There is always a pruned patch to overwrite, because `sampled_keep` prunes at least one for these reducers.
        index = pruned_mask.detach().argmax(1, keepdim=True)
        patches = state.patches.scatter(1, index[..., None].expand_as(fused_token), fused_token)
        return SampledTokens(keep, patches, index)


@dataclass(frozen=True)
class SPViT(EViT):
    """Keeps the highest-scoring patches and fuses the others, weighted by keep probability (Kong et al., 2022).

    `scores` can be any selecting reducer, such as the paper's selector (the default), or SPOT's predictor (SPOT, Table
    3). The paper also searches for the layers at which to prune, based on latency. In attnrx, you choose these layers
    in the policy.
    """

    name: ClassVar[str] = "spvit"
    scores: Selecting = field(default=HeadSelector())


@dataclass(frozen=True)
class DTPS(Soft):
    """Keeps the highest-scoring patches, and fuses all others into the most similar kept patch (Wei et al., 2023).

    Similarity is the cosine c of two tokens. A kept patch becomes a weighted mean of itself, with the weight exp(1),
    and the patches matched to it, with the weights exp(c). In attention the mean counts as one token. `scores` can be
    any selecting reducer, such as DynamicViT's predictor (the paper's dTPS), class attention (the paper's eTPS, which
    prunes inside a layer and not before it), or SPOT's predictor.
    """

    scores: Selecting = field(default=DynamicViT())

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor, plus the MACs of comparing all patches with the kept patches."""
        return super().predictor_macs(shape, patches, count) + patches * count * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        kept = best(self.scores.relevance(state, predictor), state.present_mask, count)
        # The mask is 1 for patches that this stage prunes. Kept patches and previously pruned patches are 0.
        pruned_mask = state.present_mask.scatter(1, kept, 0.0)
        unit = nn.functional.normalize(state.patches, dim=-1)
        cosines = unit @ gathered_rows(unit, kept).transpose(1, 2)  # [batch, patches, hosts]
        tokens = _squeezed(state.patches, gathered_rows(state.patches, kept), cosines, pruned_mask)
        destinations = destinations_of(kept, cosines.argmax(-1)) if state.tracked else None
        return Reduction(kept, tokens, destinations=destinations)

    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Fuses every pruned patch into the most similar kept patch. Pruned patches stay in place, but are masked."""
        unit = nn.functional.normalize(state.patches, dim=-1)
        # All patches are hosts, and pruned hosts are masked, so that shapes do not depend on the sample.
        cosines = (unit @ unit.transpose(1, 2)).masked_fill(keep[:, None, :] == 0, float("-inf"))
        # The choice of the host has no gradient. Gradients reach the sample through a patch's weight, 1 - keep.
        return SampledTokens(keep, _squeezed(state.patches, state.patches, cosines, state.present_mask * (1 - keep)))


def _fused(patches: Tensor, weights: Tensor, normalized: bool) -> Tensor:
    """Returns the weighted mean or sum of each image's patches as one token, which is zero if all weights are zero."""
    if not normalized:
        return (weights[:, None] @ patches.to(weights.dtype)).to(patches.dtype)
    total = weights.sum(1, keepdim=True)
    # The small constant depends on the dtype, because float16 cannot represent 1e-12.
    shares = weights / total.clamp_min(1e-12 if total.dtype.itemsize > 2 else 1e-6)
    return (shares[:, None] @ patches.to(shares.dtype)).to(patches.dtype)


def _squeezed(patches: Tensor, hosts: Tensor, cosines: Tensor, pruned_mask: Tensor) -> Tensor:
    """Returns the host patches after the pruned patches (1 in `pruned_mask`) have been fused into them.

    `hosts` is [batch, hosts, width]. `cosines` [batch, patches, hosts] is the cosine similarity of patches and hosts.
    """
    similarity, host = cosines.max(-1)
    # Under autocast the products have a lower precision than the patches, but scatter_add needs one dtype.
    weights = similarity.to(patches.dtype).exp() * pruned_mask
    # A kept patch has similarity 1 to itself, so its weight is e.
    total = torch.full_like(hosts[..., 0], math.e).scatter_add(1, host, weights)
    weighted_sum = (hosts * math.e).scatter_add(1, host[..., None].expand_as(patches), patches * weights[..., None])
    return weighted_sum / total[..., None]
