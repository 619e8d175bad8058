"""A batch in parts: where nothing is recorded, images pass through a model a few at a time, in memory that is warm."""

import copy
from collections.abc import Callable

import torch
from torch import nn

from attnrx.attention import Attention, AttentionContext
from attnrx.models.token_reduction import reduction_of
from attnrx.models.token_run import TokenRun
from attnrx.shapes import Float, Tensor

WARM = 8 * 2**20
"""Bytes of the largest activation that a CPU thread handles at once.

Larger ones are taken from the operating system anew at every operation, page by page, and read from memory instead of
a cache: that costs more than starting the operations several times.
"""


def chunked_forward(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    images: Float[Tensor, "batch channels height width"],
    largest: int,
) -> Tensor:
    """Returns `run(images)`, a few images at a time on a CPU where no gradients are recorded and no hook reads the
    batch.

    `largest` is how many numbers an image makes of itself in the widest place. The model must treat every image of a
    batch by itself, as all do in evaluation mode.
    """
    context = AttentionContext.of(images.flatten(2))
    if not context.free_on_cpu or largest < 1:
        return run(images)
    most = max(context.threads * WARM // (largest * images.element_size()), 1)
    if len(images) <= most or any(map(_sees_batches, model.modules())):
        return run(images)
    reduction, found, runs = reduction_of(model), [], []
    for part in images.split(most):
        found.append(run(part))
        if reduction is not None:
            runs.append(copy.copy(reduction.run))
    if reduction is not None:
        reduction.run = TokenRun.joined(runs)
    return torch.cat(found)


def _sees_batches(module: nn.Module) -> bool:
    """Whether a part of the model is in training, or tells somebody of what passes through it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if module.training or not all(getattr(hook, "by_image", False) for hook in hooks):
        return True
    return isinstance(module, Attention) and module.backend.watches
