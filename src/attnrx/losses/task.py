"""The task itself: cross-entropy."""

from dataclasses import dataclass

import torch.nn.functional as F

from attnrx.errors import InvalidInput
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Task(Loss):
    """Cross-entropy against the labels, of which `label_smoothing` is spread evenly over all classes."""

    label_smoothing: float = 0.1
    weight: float = 1.0

    def __post_init__(self):
        require_weight(self)
        if not 0 <= self.label_smoothing < 1:
            raise InvalidInput(f"{self}: label_smoothing is a share of the label and must lie in [0, 1).")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Gives the mean cross-entropy of the batch."""
        return F.cross_entropy(context.logits, context.labels, label_smoothing=self.label_smoothing)
