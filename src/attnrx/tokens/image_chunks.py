"""Splits a batch into chunks of images whose attention maps fit the CPU cache."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Tensor

CACHED = 2**20
"""Bytes of the attention map of all heads in one chunk on a CPU."""


@dataclass(frozen=True)
class Part:
    """The images from `start` to `stop` of a batch of `batch` images."""

    start: int
    stop: int
    batch: int

    @property
    def images(self) -> slice:
        """Their indices in the batch."""
        return slice(self.start, self.stop)

    @property
    def is_last(self) -> bool:
        """Whether this is the last chunk."""
        return self.stop == self.batch


def images_of(part: Part | None) -> slice:
    """Returns the indices of a chunk's images; all where it is None."""
    return slice(None) if part is None else part.images


def chunks_of(like: Tensor, heads: int, queries: int, keys: int) -> tuple[Part | None, ...]:
    """Splits a batch into chunks whose attention maps [heads, queries, keys] fit the cache; `like` is any tensor of it.

    Returns (None,), the whole batch, where gradients are enabled, during compilation, and on devices other than a CPU.
    """
    if like.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (None,)
    batch = like.shape[0]
    most = max(CACHED // max(heads * queries * keys * like.element_size(), 1), 1)
    if most >= batch:
        return (None,)
    return tuple(Part(start, min(start + most, batch), batch) for start in range(0, batch, most))
