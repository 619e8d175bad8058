"""Some images of a batch at a time, so that their attention is still in the cache when it is read again."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Tensor

CACHED = 2**20
"""Bytes of one map of all heads that are handled at once on a CPU."""


@dataclass(frozen=True)
class Part:
    """The images from `start` to `stop` of a batch of so many."""

    start: int
    stop: int
    batch: int

    @property
    def images(self) -> slice:
        """Their places."""
        return slice(self.start, self.stop)

    @property
    def is_last(self) -> bool:
        """Whether no image follows."""
        return self.stop == self.batch


def images_of(part: Part | None) -> slice:
    """Returns the places of a part's images, all where it is None."""
    return slice(None) if part is None else part.images


def chunks_of(like: Tensor, heads: int, queries: int, keys: int) -> tuple[Part | None, ...]:
    """Splits a batch, of which `like` is any tensor, where maps of so many heads, queries and keys outgrow the cache.

    It stays whole, which is None, where gradients are wanted, where the graph is captured, and on anything but a CPU.
    """
    if like.device.type != "cpu" or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (None,)
    batch = like.shape[0]
    most = max(CACHED // max(heads * queries * keys * like.element_size(), 1), 1)
    if most >= batch:
        return (None,)
    return tuple(Part(start, min(start + most, batch), batch) for start in range(0, batch, most))
