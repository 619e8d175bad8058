"""A reducer with a learned predictor on token features: DynamicViT, whose parts SPOT and SPViT's selector share."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens import Predicting, Shape, TokenState
from attnrx.vit.tokens.reducer import KeepDrop, PerPatch


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
