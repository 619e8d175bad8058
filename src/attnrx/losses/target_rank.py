"""A penalty that pulls the effective rank of every head towards a target."""

from dataclasses import dataclass

import torch

from attnrx.attention.forms import SvdaForm
from attnrx.diagnostics.spectral_shape import effective_rank
from attnrx.errors import InvalidInput, NotSupported
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.models import family_of
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class TargetRank(Loss):
    """The squared distance of a head's effective rank to `rank` (Eq. 28), averaged over the heads of all layers.

    Only the strengths receive gradients. Heads without directions have no effective rank and are skipped.
    """

    rank: float
    weight: float = 0.01

    def __post_init__(self):
        require_weight(self)
        if not self.rank >= 1:
            raise InvalidInput(f"{self}: an effective rank is at least 1.")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean of (effective rank - rank)^2."""
        ranks = torch.stack([effective_rank(strength) for strength in _strengths(context)])
        return (ranks - self.rank).square().mean()


def _strengths(context: LossContext) -> list[Tensor]:
    layers = family_of(context.model).attention(context.model)
    own = [
        strength
        for layer in layers
        if isinstance(layer.scores, SvdaForm)
        for strength in layer.scores.strength.split(layer.spec.ranks)
        if strength.numel()
    ]
    if not own:
        raise NotSupported("TargetRank needs learned strengths, and this model has none: train an SVDA model.")
    return own
