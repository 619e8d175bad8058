"""What a layer is run on at one call: all that the choice of a kernel may depend on beside the layer itself."""

from typing import NamedTuple

import torch

from attnrx.shapes import Tensor


class AttentionContext(NamedTuple):
    """How many images and tokens there are, where they lie, and whether the call is free.

    A call is free where nothing is recorded of it: no gradients, no graph that is captured. Only then may buffers be
    reused and the batch be taken in parts. An export for batches of any size cannot say how many images there are.
    """

    images: int | torch.SymInt
    tokens: int | torch.SymInt
    device: str
    dtype: torch.dtype
    threads: int
    free: bool

    @classmethod
    def of(cls, tokens: Tensor) -> "AttentionContext":
        """Reads the context off the tokens of all images, [batch, tokens, width]."""
        free = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.jit.is_tracing())
        threads = torch.get_num_threads() if free else 0
        return cls(tokens.shape[0], tokens.shape[1], tokens.device.type, tokens.dtype, threads, free)

    @property
    def free_on_cpu(self) -> bool:
        """Whether the call is free, and on a CPU."""
        return self.free and self.device == "cpu"

    def has_fewer_than(self, count: int) -> bool:
        """Whether all images together are known to have fewer tokens.

        An export must not ask: its answer would hold for batches of one size alone, and to a strict one (Dynamo) a size
        of any value is an int.
        """
        if torch.compiler.is_exporting():
            return False
        total = self.images * self.tokens
        return isinstance(total, int) and total < count
