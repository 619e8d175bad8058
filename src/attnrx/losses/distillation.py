"""Distillation from the logits of another model."""

from dataclasses import dataclass

import torch.nn.functional as F

from attnrx.errors import InvalidInput
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.losses.teaching import taught
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Distillation(Loss):
    """The divergence KL(teacher || model) of the softened outputs, times temperature^2 (Hinton et al., 2015).

    The factor keeps the size of the gradient. `teacher` is a folder or a name that `load_model` reads, such as
    timm:NAME, then with `weights`, a local file. Labels are not used: with this loss alone, training needs none.
    """

    teacher: str
    temperature: float = 1.0
    weight: float = 0.5
    weights: str | None = None

    def __post_init__(self):
        require_weight(self)
        if not 0 < self.temperature < float("inf"):
            raise InvalidInput(f"{self}: temperature must be positive and finite.")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the mean divergence of the batch."""
        teacher_logits = taught(context, self.teacher, self.weights).logits
        if teacher_logits.shape != context.logits.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} has {teacher_logits.shape[1]} classes and the model "
                f"{context.logits.shape[1]}; take a teacher of the same task."
            )
        target = F.log_softmax(teacher_logits / self.temperature, dim=-1)
        predicted = F.log_softmax(context.logits / self.temperature, dim=-1)
        return F.kl_div(predicted, target, log_target=True, reduction="batchmean") * self.temperature**2
