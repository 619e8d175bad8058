"""Decisions that can be learned from: drawn, hard, and with a gradient."""

import torch
import torch.nn.functional as F

from attnrx.shapes import Float, Tensor


def sampled_keep(
    scores: Float[Tensor, "batch patches 2"],
    there: Float[Tensor, "batch patches"],
    temperature: float,
    prunes_one: bool = False,
) -> Float[Tensor, "batch patches"]:
    """Draws 1 (stays) or 0 (leaves) for every patch by the Gumbel-softmax of its scores, straight through.

    What has left stays away, and an image never loses its last patch: where the draw would leave none, the patch of
    the highest score stays. Without that a low keep ratio ends in means over nothing, and NaN. With `prunes_one`, for a
    reducer that puts a token in the place of what leaves, the patch of the lowest score leaves where none would.
    """
    sampled = F.gumbel_softmax(scores.float(), tau=temperature, hard=True, dim=-1)[..., 0].to(there.dtype)
    keep = sampled * there
    best = scores[..., 0].detach().masked_fill(there == 0, float("-inf")).argmax(1, keepdim=True)
    lost = (keep.detach().sum(1, keepdim=True) == 0).to(keep.dtype)
    keep = keep + torch.zeros_like(keep).scatter(1, best, lost)
    if not prunes_one:
        return keep
    worst = scores[..., 0].detach().masked_fill(there == 0, float("inf")).argmin(1, keepdim=True)
    whole = ((keep.detach() > 0).sum(1, keepdim=True) == (there > 0).sum(1, keepdim=True)).to(keep.dtype)
    return keep - torch.zeros_like(keep).scatter(1, worst, whole)
