"""Cross-entropy."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from attnrx.errors import InvalidInput
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Task(Loss):
    """Cross-entropy against the labels; `label_smoothing` is spread evenly over all classes."""

    reads_labels: ClassVar[bool] = True
    label_smoothing: float = 0.1
    weight: float = 1.0

    def __post_init__(self):
        require_weight(self)
        if not 0 <= self.label_smoothing < 1:
            raise InvalidInput(f"{self}: label_smoothing is a share of the label and must lie in [0, 1).")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean cross-entropy of the batch."""
        own = self._against(context.logits, context.labels)
        if context.partners is None:
            return own
        return context.share * own + (1 - context.share) * self._against(context.logits, context.partners)

    def _against(self, logits: Float[Tensor, "batch classes"], labels: Int[Tensor, "batch"]) -> Float[Tensor, ""]:
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
