"""The loss that trains learned reducers to keep the share of patches that the policy requests (SPOT, DynamicViT)."""

from dataclasses import dataclass

import torch

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses import LOSSES, Loss, LossContext
from attnrx.vit.models import reduction_of


@dataclass(frozen=True)
class KeepRatio(Loss):
    """The squared difference between the sampled and the requested keep ratio, averaged over images and stages.

    The loss is SPOT's Eq. 12.
    """

    weight: float = 2.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        reduction, run = reduction_of(context.model), context.run
        if reduction is None or run is None or not run.sampled:
            raise NotSupported(
                "KeepRatio needs a learned token reducer (spot, dynamicvit) in training, and the run of the step in "
                "its context (recording_tokens); attach a policy or omit the loss."
            )
        # Masked tokens stay in place, so the mean of the mask over all patches is the kept share, [images, stages].
        shares = torch.stack([keep.mean(1) for keep in run.sampled.values()], dim=1)
        kept = shares.new_tensor([reduction.policy.keep[stage] for stage in run.sampled])
        return (shares - kept).square().mean()


LOSSES.register(KeepRatio)
