"""The base of all models: checks the images, and runs a few at a time on a CPU, so that activations stay cached."""

import copy
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention, AttentionContext
from attnrx.errors import InvalidInput
from attnrx.models.token_reduction import TokenReduction, TokenRun
from attnrx.shapes import ImageBatch, Logits

WARM = 8 * 2**20
"""Bytes of the largest activation that a CPU thread handles at once.

The operating system allocates larger ones anew, page by page, at every operation, and they do not fit the cache: that
takes longer than starting the operations several times.
"""


class ImageModel(nn.Module):
    """A model of images, which treats those of a batch independently in evaluation mode.

    `tokens` is the attached token reduction (`attach_tokens_`).
    """

    def __init__(self):
        super().__init__()
        self.tokens: TokenReduction | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Elements per image of the largest activation."""
        raise NotImplementedError

    def logits(self, images: ImageBatch) -> Logits:
        """Returns the logits of images of the right shape."""
        raise NotImplementedError

    def forward(self, images: ImageBatch) -> Any:
        """Returns the logits, computed in chunks on a CPU where no gradients are recorded and no hook needs the whole
        batch; pooled features where the model has no classifier.
        """
        self.require_images(images)
        context = AttentionContext.of(images.flatten(2))
        if not context.free_on_cpu:
            return self.logits(images)
        most = max(context.threads * WARM // (self.largest * images.element_size()), 1)
        if len(images) <= most or any(map(_needs_whole_batch, self.modules())):
            return self.logits(images)
        outputs, runs = [], []
        for chunk in images.split(most):
            outputs.append(self.logits(chunk))
            if self.tokens is not None:
                runs.append(copy.copy(self.tokens.run))
        if self.tokens is not None:
            self.tokens.run = TokenRun.joined(runs)
        return torch.cat(outputs)

    def require_images(self, images: ImageBatch) -> None:
        """Raises InvalidInput for images that are not of the model's shape."""
        if images.shape[1:] != self.input_shape:
            channels, height, width = self.input_shape
            raise InvalidInput(
                f"images of shape {tuple(images.shape)}: the model takes [batch, {channels}, {height}, {width}]. Load "
                f"the data with image_size={height}."
            )


def _needs_whole_batch(module: nn.Module) -> bool:
    """Returns whether a module is in training mode, or has hooks or a backend that must receive the whole batch."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if module.training or not all(getattr(hook, "by_image", False) for hook in hooks):
        return True
    return isinstance(module, Attention) and module.backend.watches
