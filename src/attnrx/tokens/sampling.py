"""Differentiable sampling of keep decisions."""

import torch
import torch.nn.functional as F

from attnrx.shapes import Float, Tensor


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
