"""A penalty for changes of attention under small changes of the image."""

from dataclasses import dataclass

import torch

from attnrx.errors import InvalidInput, NotSupported
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.models import family_of, observing
from attnrx.observation import Observation
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class PerturbationRobustness(Loss):
    """The squared Frobenius change of the attention maps under Gaussian noise (Eq. 34).

    Averaged over images, heads and layers. `scale` is the standard deviation of the noise in normalized units. Images
    and noisy images pass once more, through the eager attention, so a step costs about three times as much.
    """

    scale: float = 0.05
    weight: float = 1.0

    def __post_init__(self):
        require_weight(self)
        if not 0 < self.scale < float("inf"):
            raise InvalidInput(f"{self}: scale is the deviation of the noise and must be positive and finite.")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean of |A(x) - A(x + noise)|^2."""
        changes: list[Tensor] = []

        def observe(_: int, observation: Observation) -> None:
            clean, noisy = observation.attention.chunk(2)
            changes.append((clean - noisy).square().sum((-2, -1)).mean())

        images = torch.cat([context.images, context.images + self.scale * context.noise()])
        with observing(context.model, family_of(context.model), observe):
            context.model.forward(images)
        if not changes:
            raise NotSupported("PerturbationRobustness needs attention maps, and every head of this model was removed.")
        return torch.stack(changes).mean()
