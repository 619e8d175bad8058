"""Reducers with a learned predictor on token features: DynamicViT, whose parts SPOT shares, and SPViT's selector."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.reducer import KeepDrop, PerPatch, Predicting, Shape
from attnrx.vit.tokens.state import TokenState


class TokenFeatures(nn.Module):
    """Projected token features: half local, half averaged over the remaining tokens."""

    def __init__(self, width: int, projected: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, projected)

    def forward(
        self, patches: Float[Tensor, "batch patches width"], present_mask: PerPatch
    ) -> Float[Tensor, "batch patches projected"]:
        features = nn.functional.gelu(self.project(self.norm(patches)))
        pooled_width = features.shape[-1] // 2
        # Of an odd number of features the local part has one more, so that a single feature is a local one.
        local, pooled = features.split([features.shape[-1] - pooled_width, pooled_width], dim=-1)
        # Masked and sampled patches stay in place, so the mean counts the remaining ones: [batch, 1, pooled].
        mean = (pooled * present_mask[..., None]).sum(1, keepdim=True) / present_mask.sum(1)[:, None, None]
        return torch.cat([local, mean.expand_as(pooled)], dim=-1)


class KeepScores(nn.Sequential):
    """Three linear maps from features to the log-probabilities of keep and drop."""

    def __init__(self, features: int):
        super().__init__(
            nn.Linear(features, features // 2),
            nn.GELU(),
            nn.Linear(features // 2, features // 4),
            nn.GELU(),
            nn.Linear(features // 4, 2),
            # The Gumbel-softmax and the policy gradient take log-probabilities.
            nn.LogSoftmax(dim=-1),
        )

    @staticmethod
    def macs(features: int, patches: int) -> int:
        half, quarter = features // 2, features // 4
        return patches * (features * half + half * quarter + quarter * 2)


class DynamicViTPredictor(nn.Module):
    """Local and global token features, then log-probabilities of keep and drop."""

    def __init__(self, width: int):
        super().__init__()
        self.features = TokenFeatures(width, width)
        self.scores = KeepScores(width)

    def forward(self, state: TokenState) -> KeepDrop:
        return self.scores(self.features(state.patches, state.present_mask))


@dataclass(frozen=True)
class DynamicViT(Predicting):
    """Keeps the patches that a learned predictor selects, from the tokens and their mean (Rao et al., 2021).

    In training the gradient of a dropped patch's mask is not exactly the paper's: in the masked softmax, the score of a
    dropped key is clamped to the largest score of the kept ones (`sized_softmax`), which changes no output and bounds
    this gradient. Without the clamp, `TokenReduction.clamps_scores = False`, it is the paper's.
    """

    def predictor(self, shape: Shape) -> nn.Module:
        return DynamicViTPredictor(shape.width)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        return patches * shape.width**2 + KeepScores.macs(shape.width, patches)


@dataclass(frozen=True)
class HeadSelector(Predicting):
    """Keeps the patches that a learned predictor of several heads selects: SPViT's selector (Kong et al., ECCV 2022).

    The width is divided among the heads. Every head has local and global features of its share and scores it; a branch
    weights the heads of every patch by the mean of each share, and the score is the weighted mean of the heads'
    probabilities. Chosen here: the perceptrons of features and scores are DynamicViT's, shared by the heads; that of
    the branch has two linear maps.
    """

    def predictor(self, shape: Shape) -> nn.Module:
        return HeadSelectorPredictor(shape.width, shape.heads)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        share, heads = shape.width // shape.heads, shape.heads
        return heads * (patches * share**2 + KeepScores.macs(share, patches)) + patches * 2 * heads**2


class HeadSelectorPredictor(nn.Module):
    """The log-probabilities of keep and drop, a weighted mean over the heads."""

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
        # The heads become images of one batch [batch * heads, patches, share], because they share one predictor.
        present_mask = state.present_mask.repeat_interleave(self.heads, dim=0)
        scores = self.scores(self.features(shares.transpose(1, 2).flatten(0, 1), present_mask))
        return head_mean(scores.unflatten(0, (-1, self.heads)), self.head_weights(shares.mean(-1)))


def head_mean(
    scores: Float[Tensor, "batch heads patches 2"], log_weights: Float[Tensor, "batch patches heads"]
) -> KeepDrop:
    """Returns the logarithm of the weighted mean of the heads' probabilities."""
    # In logarithms, so that small probabilities do not underflow; the second term normalizes the weights.
    weights = log_weights.transpose(1, 2)[..., None]
    return torch.logsumexp(scores + weights, dim=1) - torch.logsumexp(weights, dim=1)
