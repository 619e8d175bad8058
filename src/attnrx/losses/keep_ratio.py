"""A penalty for deviating from the requested share of tokens."""

from dataclasses import dataclass

import torch

from attnrx.errors import NotSupported
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.models import reduction_of
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class KeepRatio(Loss):
    """The squared distance of the share of kept patches from the policy's, over images and stages (Eq. 12)."""

    weight: float = 2.0

    def __post_init__(self):
        require_weight(self)

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean over the images and the stages."""
        reduction = reduction_of(context.model)
        if reduction is None or not reduction.run.sampled:
            raise NotSupported(
                "KeepRatio needs a learned token reducer (spot, dynamicvit), and this model has none; attach a policy "
                "or omit the loss."
            )
        wanted = reduction.policy.keep
        found = torch.stack([keep.mean(1) for keep in reduction.run.sampled], dim=1)
        return (found - found.new_tensor(wanted[: found.shape[1]])).square().mean()
