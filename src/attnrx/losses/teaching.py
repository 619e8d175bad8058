"""Teachers: other, frozen models that run on the images of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from attnrx.data import Normalization
from attnrx.losses.loss import LossContext
from attnrx.models import family_of, load_model, recording_blocks
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Answer:
    """The logits of a teacher, and the outputs of its blocks where the step needs features."""

    logits: Float[Tensor, "batch classes"]
    features: Sequence[Float[Tensor, "batch tokens features"]]


def taught(context: LossContext, teacher: str, weights: str | None) -> Answer:
    """Runs the teacher on the images of the step, once for all losses that need it.

    A teacher trained with another normalization receives the images on its own scale.
    """
    key = (teacher, weights)
    if key not in context.memory:
        context.memory[key] = _run(_load(teacher, weights, context.images.device, context.images.dtype), context)
    return context.memory[key]


@torch.no_grad()
def _run(teacher: nn.Module, context: LossContext) -> Answer:
    own, theirs = _scale(context.model), _scale(teacher)
    images = context.images if own == theirs else theirs.apply(own.invert(context.images))
    if not context.features:
        return Answer(teacher(images).to(context.logits.dtype), ())
    with recording_blocks(teacher, family_of(teacher)) as features:
        logits = teacher(images).to(context.logits.dtype)
    return Answer(logits, tuple(features))


@lru_cache(maxsize=2)  # a frozen loss holds no model; loading it again for every step would be slow
def _load(teacher: str, weights: str | None, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return load_model(teacher, weights=weights).to(device, dtype).eval().requires_grad_(False)


def _scale(model: nn.Module) -> Normalization:
    return Normalization(*family_of(model).normalization(model))
