"""The call context: the properties of one call on which the choice of a backend depends."""

from typing import NamedTuple

import torch

from attnrx.shapes import Tensor


class AttentionContext(NamedTuple):
    """The shape, device and recording state of one call.

    A call is free if nothing of it is recorded: no gradients, no captured graph. Only then may buffers be reused and
    the batch be computed in chunks. In an export for batches of any size the number of images is unknown.
    """

    images: int | torch.SymInt
    tokens: int | torch.SymInt
    device: str
    dtype: torch.dtype
    threads: int
    free: bool

    @classmethod
    def of(cls, tokens: Tensor) -> "AttentionContext":
        """Returns the context of tokens of shape [batch, tokens, width]."""
        free = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.jit.is_tracing())
        threads = torch.get_num_threads() if free else 0
        return cls(tokens.shape[0], tokens.shape[1], tokens.device.type, tokens.dtype, threads, free)

    @property
    def free_on_cpu(self) -> bool:
        """Whether the call is free and on a CPU."""
        return self.free and self.device == "cpu"

    def has_fewer_than(self, count: int) -> bool:
        """Whether all images together are known to have fewer tokens.

        False during export: the result would hold for batches of one size only, and in a strict export (Dynamo) a
        symbolic size is an int.
        """
        if torch.compiler.is_exporting():
            return False
        total = self.images * self.tokens
        return isinstance(total, int) and total < count
