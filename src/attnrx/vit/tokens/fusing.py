"""Soft reducers, which select patches by another reducer's scores and fuse pruned patches into the others; EViT."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.reducer import (
    KeepDrop,
    PerPatch,
    Reducer,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    best,
    destinations_of,
    odds,
)
from attnrx.vit.tokens.state import TokenState, gathered_rows
from attnrx.vit.tokens.untrained_scores import ClassAttention


@dataclass(frozen=True)
class Soft(Reducer):
    """Uses the relevance of `scores`, any selecting reducer, with its statistics and its predictor."""

    scores: Selecting

    def __post_init__(self):
        if not isinstance(self.scores, Selecting):
            name, scores_name = type(self).__name__, type(self.scores).__name__
            raise InvalidInput(
                f"{name} uses the scores of another reducer, and {scores_name} gives no scores; "
                "give e.g. DynamicViT, Spot or ClassAttention."
            )
        for name in ("needs", "learned", "one_predictor"):  # what the scores need is measured and trained
            object.__setattr__(self, name, getattr(self.scores, name))

    @property
    def untrained_reason(self) -> str | None:
        return self.scores.untrained_reason

    def predictor(self, shape: Shape) -> nn.Module:
        return self.scores.predictor(shape)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor of the scores."""
        return self.scores.predictor_macs(shape, patches, count)

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> KeepDrop:
        return self.scores.keep_scores(state, predictor)

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        return self.scores.layer_score(tokens)

    def accumulate(self, before: PerPatch | None, scores: PerPatch) -> PerPatch:
        return self.scores.accumulate(before, scores)


@dataclass(frozen=True)
class EViT(Soft):
    """Keeps the patches of the highest class attention, and one fused token for all others (Liang et al., 2022).

    The fused token is added to the `count` kept patches; later stages treat it as a patch. It is the mean of the
    others, weighted by their class attention, so that it has the size of a patch in a model that was not trained with
    it. As published it is the plain sum of class attention times patch: `normalized=false`. As published tokens are
    pruned between the attention and the MLP of a layer; here, as with every reducer, before the next layer. Other
    `scores` can replace class attention.
    """

    scores: Selecting = field(default=ClassAttention())
    normalized: bool = True

    extra: ClassVar[int] = 1

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of the predictor of the scores, and of the fused token."""
        return super().predictor_macs(shape, patches, count) + patches * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        relevance = self.scores.relevance(state, predictor)
        kept = best(relevance, state.present_mask, count)
        # Only patches that this stage prunes are fused: neither kept ones nor those pruned by an earlier stage.
        weights = self.scores.weights(relevance).masked_fill(state.present_mask == 0, 0.0).scatter(1, kept, 0.0)
        # The fused token follows the `count` kept ones; it represents all others.
        fused_index = torch.full_like(state.patch_indices, count)
        destinations = destinations_of(kept, fused_index) if state.tracked else None
        tokens, fused_token = gathered_rows(state.patches, kept), _fused(state.patches, weights, self.normalized)
        return Reduction(kept, tokens, fused_token, destinations=destinations)

    def sampled(self, state: TokenState, keep: PerPatch, scores: KeepDrop) -> SampledTokens:
        """Overwrites the first pruned patch by the fused token."""
        pruned_mask = state.present_mask * (1 - keep)
        fused_token = _fused(state.patches, self.scores.weights(odds(scores)) * pruned_mask, self.normalized)
        # There is a pruned patch to overwrite: `sampled_keep` prunes one where a reducer has an extra token.
        index = pruned_mask.detach().argmax(1, keepdim=True)
        return SampledTokens(state.patches.scatter(1, index[..., None].expand_as(fused_token), fused_token), index)


def _fused(patches: Tensor, weights: Tensor, normalized: bool) -> Tensor:
    """Returns the weighted mean or sum of the patches, one token per image; zeros where all weights are zero."""
    if not normalized:
        return (weights[:, None] @ patches.to(weights.dtype)).to(patches.dtype)
    total = weights.sum(1, keepdim=True)
    # float16 has no 1e-12.
    shares = weights / total.clamp_min(1e-12 if total.dtype.itemsize > 2 else 1e-6)
    return (shares[:, None] @ patches.to(shares.dtype)).to(patches.dtype)
