"""The predictors of learned reducers."""

import torch
from torch import nn

from attnrx.shapes import Float, Tensor


class TokenFeatures(nn.Module):
    """Projected token features: half local, half averaged over the remaining tokens (DynamicViT)."""

    def __init__(self, width: int, projected: int):
        super().__init__()
        self.projected = projected
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, projected)

    def forward(
        self, patches: Float[Tensor, "batch patches width"], there: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch patches projected"]:
        """Returns local and global features."""
        found = nn.functional.gelu(self.project(self.norm(patches)))
        local, pooled = found.split([self.projected - self.projected // 2, self.projected // 2], dim=-1)
        mean = (pooled * there[..., None]).sum(1, keepdim=True) / there.sum(1)[:, None, None]
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
            nn.LogSoftmax(dim=-1),
        )

    @staticmethod
    def macs(features: int, patches: int) -> int:
        """Returns the MACs for this number of patches."""
        half, quarter = features // 2, features // 4
        return patches * (features * half + half * quarter + quarter * 2)


def feature_macs(width: int, projected: int, patches: int) -> int:
    """Returns the MACs of the token features: the projection."""
    return patches * width * projected
