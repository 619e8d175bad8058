"""One head per shared direction: the rank constraint of IrrAtt as a penalty for training CP SlimAtt."""

from dataclasses import dataclass

import torch

from attnrx.attention.forms import SharedForm
from attnrx.decompositions import ownership_penalty
from attnrx.errors import NotSupported
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.models import family_of
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class FusionOwnership(Loss):
    """The distance of the shared directions from having one head each: the constraint S S^T = I of Eq. 7, as a penalty.

    (sum of |s|)^2 / (sum of s^2) - 1 over the heads, averaged over the directions of all layers: 0 if and only if
    every direction is used by one head, heads - 1 if all use it alike. Its share of the weight grows linearly from 0
    to 1 over the run, so that heads first learn what they need. With `nonnegative_fusion` the other half of the
    constraint, S >= 0, holds as well; `fusion_owner` then cuts the model into irregular heads.
    """

    weight: float = 1.0

    def __post_init__(self):
        require_weight(self)

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean penalty per direction, times the progress of the run."""
        fusions = [layer.scores.strength for layer in _shared(context)]
        total = torch.stack([ownership_penalty(fusion) for fusion in fusions]).sum()
        return context.progress * total / sum(fusion.shape[1] for fusion in fusions)


def _shared(context: LossContext) -> list:
    layers = family_of(context.model).attention(context.model)
    found = [layer for layer in layers if isinstance(layer.scores, SharedForm) and layer.scores.strength.numel()]
    if not found:
        raise NotSupported(
            "FusionOwnership needs directions that heads share, and this model has none: realize a prescription of the "
            "rule shared_rank first."
        )
    return found
