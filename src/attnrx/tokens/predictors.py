"""Learned predictors of token reducers, and the masks sampled from them in training."""

import torch
import torch.nn.functional as F
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


def sampled_keep(
    scores: Float[Tensor, "batch patches 2"],
    there: Float[Tensor, "batch patches"],
    temperature: float,
    prunes_one: bool = False,
) -> Float[Tensor, "batch patches"]:
    """Samples 1 (keep) or 0 (prune) for every patch by the straight-through Gumbel-softmax of its scores.

    Pruned patches stay pruned. An image always keeps a patch: if the sample prunes all, the patch of the highest score
    is kept. Otherwise low keep ratios lead to means over no patches, and NaN. With `prunes_one`, for a reducer that
    overwrites a pruned patch by a new token, the patch of the lowest score is pruned if the sample keeps all.
    """
    sample = F.gumbel_softmax(scores.float(), tau=temperature, hard=True, dim=-1)[..., 0].to(there.dtype)
    keep = sample * there
    best = scores[..., 0].detach().masked_fill(there == 0, float("-inf")).argmax(1, keepdim=True)
    keeps_none = (keep.detach().sum(1, keepdim=True) == 0).to(keep.dtype)
    keep = keep + torch.zeros_like(keep).scatter(1, best, keeps_none)
    if not prunes_one:
        return keep
    worst = scores[..., 0].detach().masked_fill(there == 0, float("inf")).argmin(1, keepdim=True)
    keeps_all = ((keep.detach() > 0).sum(1, keepdim=True) == (there > 0).sum(1, keepdim=True)).to(keep.dtype)
    return keep - torch.zeros_like(keep).scatter(1, worst, keeps_all)
