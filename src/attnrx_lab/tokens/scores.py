"""Reducers that keep the highest-scoring patches: SPOT's heuristic, Evo-ViT, ATS, A-ViT's rule, SPViT's selector."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.tokens import LayerStatistic, Reducer, Reduction, Selecting, Shape, TokenState
from attnrx.vit.tokens.reducer import PerPatch, reduced_to_best
from attnrx_lab.tokens.learned_scores import KeepDrop, KeepScores, Predicting, TokenFeatures


@dataclass(frozen=True)
class TokenScores(LayerStatistic):
    """A score for every token, accumulated over the layers."""

    scores: Float[Tensor, "batch tokens"]

    def at(self, kept: Int[Tensor, "batch kept"], num_new: int = 0) -> "TokenScores":
        scores = self.scores.gather(1, kept)
        return TokenScores(nn.functional.pad(scores, (0, num_new)) if num_new else scores)

    def without(self, indices: Int[Tensor, "batch removed"]) -> "TokenScores":
        return TokenScores(self.scores.scatter(1, indices, 0.0))


def scores_of(state: TokenState) -> PerPatch:
    """Returns the accumulated scores of the patches."""
    assert isinstance(state.statistic, TokenScores)
    return state.statistic.scores[:, state.prefix :]


@dataclass(frozen=True)
class AttentionAverage(Selecting):
    """Keeps the patches with the highest class attention, averaged over heads and all previous layers (SPOT, Table 7).

    The reducer reads only the class token's row of every attention map. For each patch, it stores only the sum of its
    scores over the layers. The sum ranks the patches in the same order as the mean.
    """

    needs, every_layer = ("class_attention",), "class_attention"

    def add_layer(self, before: TokenScores | None, observed: Float[Tensor, "batch heads tokens"]) -> TokenScores:
        return TokenScores(self.accumulate(None if before is None else before.scores, observed.mean(1)))

    def accumulate(
        self, before: Float[Tensor, "batch tokens"] | None, scores: Float[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        """Adds one layer's scores to `before`, the accumulated scores of earlier layers (None if there are none)."""
        return scores if before is None else before + scores

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        # A token that an earlier stage fused starts at 0, so its sum covers only the layers after that stage.
        return scores_of(state)


@dataclass(frozen=True)
class EvoViT(AttentionAverage):
    """Keeps the patches with the highest global class attention (Xu et al., AAAI 2022).

    Let A be the class attention of a layer, averaged over the heads. The global class attention G is initialized with
    the A of the first layer. Each later layer updates G to `alpha` G + (1 - `alpha`) A. In the paper, patches that are
    not selected stay as placeholders, which are updated from one representative token. This class prunes such patches.
    To replace them by one fused token, use `evit(scores=evo_vit)`.
    """

    name: ClassVar[str] = "evo_vit"
    alpha: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha < 1:
            raise InvalidInput(f"{self}: alpha is the weight of the previous layers; give a number in [0, 1).")

    def accumulate(
        self, before: Float[Tensor, "batch tokens"] | None, scores: Float[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens"]:
        return scores if before is None else self.alpha * before + (1 - self.alpha) * scores


@dataclass(frozen=True)
class ATS(Reducer):
    """Adaptive token sampling (Fayyaz et al., ECCV 2022) with a fixed number of patches and without learning.

    The significance of a patch is its class attention times the norm of its value vector. It is scaled to sum to 1 in
    every head, and then averaged over the heads. Inverse transform sampling at the fixed points (2 k - 1) / (2 K)
    (k = 1..K) selects the patches. Several points can hit the same patch if its significance is large. The paper keeps
    such a patch only once, so the number of patches differs between images. This class always keeps K patches. It fills
    the remaining places with the most significant patches that no point hit. The paper removes patches inside the
    attention of a layer, but this class removes them before the next layer.
    """

    needs = ("class_attention", "value_norms")

    def significance(self, state: TokenState) -> PerPatch:
        """Returns every patch's probability of being sampled. Pruned patches have probability 0."""
        assert state.class_attention is not None
        assert state.value_norms is not None
        scores = (state.class_attention * state.value_norms)[:, :, state.prefix :] * state.present_mask[:, None]
        totals = scores.sum(2, keepdim=True)
        # A head whose values are all zero adds nothing to the sum. The 1 avoids a division by zero.
        scores = (scores / torch.where(totals > 0, totals, 1.0)).sum(1)
        # If the values of all heads are zero, the remaining patches are equally significant.
        scores = torch.where(scores.sum(1, keepdim=True) > 0, scores, state.present_mask)
        return scores / scores.sum(1, keepdim=True)

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Samples patches at `count` fixed points, and keeps `count` patches."""
        significance = self.significance(state)
        # floor(K s + 1/2) points lie below the cumulative probability s. A patch is hit if more points lie below its
        # end than below its beginning.
        ends = (count * significance.cumsum(1) + 0.5).floor()
        hit = ends > torch.nn.functional.pad(ends, (1, 0))[:, :-1]
        # A significance is at most 1, so adding 2 puts every hit before every other patch.
        return reduced_to_best(state, significance + 2 * hit, count)


@dataclass(frozen=True)
class HaltingScores(Selecting):
    """Prunes the patches with the largest sum of halting scores, as in A-ViT (Yin et al., CVPR 2022).

    After every layer, a token's halting score is sigmoid(gamma x + beta), where x is the token's first feature. The
    model must be trained with A-ViT's ponder loss and distribution prior. Otherwise x has no meaning, and the results
    are not A-ViT's. In A-ViT, a token halts as soon as the sum of its scores reaches 1 - epsilon, so the number of kept
    tokens differs between images. In attnrx, the policy sets this number, and only the order of pruning follows A-ViT.
    A-ViT's output is the class token averaged over the layers, weighted by halting probabilities. In attnrx, the class
    token does not halt.
    """

    # The paper's values.
    gamma: float = 5.0
    beta: float = -10.0

    every_layer = "tokens"

    def __post_init__(self):
        super().__post_init__()
        if not (math.isfinite(self.gamma) and math.isfinite(self.beta)) or self.gamma == 0:
            raise InvalidInput(f"{self}: gamma scales a feature and beta shifts it; give finite numbers, gamma not 0.")

    @property
    def untrained_reason(self) -> str:
        return "the first feature of a token is no halting score until a ponder loss trains it"

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        """Returns every token's halting score after one layer."""
        return torch.sigmoid(self.gamma * tokens[..., 0] + self.beta)

    def add_layer(self, before: TokenScores | None, observed: Float[Tensor, "batch tokens width"]) -> TokenScores:
        scores = self.layer_score(observed)
        return TokenScores(scores if before is None else before.scores + scores)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        return -scores_of(state)  # the patch with the largest sum is the first to halt

    def weights(self, relevance: PerPatch) -> PerPatch:
        """Returns every patch's remainder, which is 1 minus the sum of its halting scores, but at least 0."""
        # `relevance` is minus the sum. A policy may keep a patch after its sum exceeds 1, so the remainder is clamped.
        return (1 + relevance).clamp(min=0)


@dataclass(frozen=True)
class HeadSelector(Predicting):
    """Keeps the patches that SPViT's learned multi-head selector chooses (Kong et al., ECCV 2022).

    The features of every patch are divided among the heads. From its share, each head computes local and global
    features, and predicts the probability that the patch is kept. Another branch computes the weights of the heads for
    every patch, from the mean of each share. The final score is the weighted mean of the heads' probabilities. Two
    choices are our own: all heads share one DynamicViT predictor, and the branch is an MLP of two linear layers.
    """

    def predictor(self, shape: Shape) -> nn.Module:
        return HeadSelectorPredictor(shape.width, shape.heads)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        share, heads = shape.width // shape.heads, shape.heads
        return heads * (patches * share**2 + KeepScores.macs(share, patches)) + patches * 2 * heads**2


class HeadSelectorPredictor(nn.Module):
    """Predicts every patch's log-probabilities of keep and drop, from a weighted mean of the heads' probabilities."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise NotSupported(
                f"HeadSelector divides the width among the heads, and {width} is no multiple of {heads}; use "
                "dynamicvit."
            )
        self.heads = heads
        self.features = TokenFeatures(width // heads, width // heads)
        self.scores = KeepScores(width // heads)
        self.head_weights = nn.Sequential(nn.Linear(heads, heads), nn.GELU(), nn.Linear(heads, heads), nn.LogSigmoid())

    def forward(self, state: TokenState) -> KeepDrop:
        shares = state.patches.unflatten(2, (self.heads, -1))  # [batch, patches, heads, share]
        # The heads share one predictor, so they become images of one batch [batch * heads, patches, share].
        present_mask = state.present_mask.repeat_interleave(self.heads, dim=0)
        scores = self.scores(self.features(shares.transpose(1, 2).flatten(0, 1), present_mask))
        return head_mean(scores.unflatten(0, (-1, self.heads)), self.head_weights(shares.mean(-1)))


def head_mean(
    scores: Float[Tensor, "batch heads patches 2"], log_weights: Float[Tensor, "batch patches heads"]
) -> KeepDrop:
    """Returns the logarithm of the weighted mean of the heads' probabilities."""
    # Computed with logarithms, so that small probabilities do not underflow. The second term normalizes the weights.
    weights = log_weights.transpose(1, 2)[..., None]
    return torch.logsumexp(scores + weights, dim=1) - torch.logsumexp(weights, dim=1)
