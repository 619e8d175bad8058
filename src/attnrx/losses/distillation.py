"""Learning from the answers of another model."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import Normalization
from attnrx.errors import InvalidInput
from attnrx.losses.loss import Loss, LossContext, require_weight
from attnrx.models import family_of, load_model
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Distillation(Loss):
    """The divergence KL(teacher || model) of the softened answers, times temperature^2.

    The factor keeps the size of the gradient. `teacher` is a folder that `load_model` reads; a teacher that was trained
    on images of other statistics gets them on its own scale.
    """

    teacher: str
    temperature: float = 1.0
    weight: float = 0.5

    def __post_init__(self):
        require_weight(self)
        if not 0 < self.temperature < float("inf"):
            raise InvalidInput(f"{self}: temperature must be positive and finite.")

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Gives the mean divergence of the batch."""
        answers = self._teach(context)
        if answers.shape != context.logits.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} answers with {answers.shape[1]} classes and the model with "
                f"{context.logits.shape[1]}; take a teacher of the same task."
            )
        wanted = F.log_softmax(answers / self.temperature, dim=-1)
        given = F.log_softmax(context.logits / self.temperature, dim=-1)
        return F.kl_div(given, wanted, log_target=True, reduction="batchmean") * self.temperature**2

    @torch.no_grad()
    def _teach(self, context: LossContext) -> Tensor:
        teacher = _load(self.teacher, context.images.device, context.images.dtype)
        own, theirs = _scale(context.model), _scale(teacher)
        images = context.images if own == theirs else theirs.apply(own.invert(context.images))
        return teacher(images).to(context.logits.dtype)


@lru_cache(maxsize=2)  # a frozen loss holds no model; loading it again for every step would
def _load(folder: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return load_model(folder).to(device, dtype).eval().requires_grad_(False)


def _scale(model: nn.Module) -> Normalization:
    return Normalization(*family_of(model).normalization(model))
