"""Attention by a kernel of our own in C++: every head at its own rank, and no map in memory."""

from collections.abc import Sequence

import torch

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import Explicit, chunked_forward
from attnrx.attention.backends.fused import Fused
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.kernels.compilation import native_library
from attnrx.attention.kernels.native import native_attention
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec

# A head's keys are rearranged once for all its queries; for so few that takes longer than it saves.
FEW_QUERIES = 8


def runs_on(context: AttentionContext) -> bool:
    """Whether the kernel takes tensors of this context, and is there."""
    return context.free_on_cpu and context.dtype == torch.float32 and native_library() is not None


class Native(Explicit):
    """Queries, keys and values of any widths, all heads in one call; for inference in float32 on a CPU.

    Heads are grouped as `Explicit` groups them. The kernel is built by the compiler at hand when first used
    (`native_library`); where there is none, and where gradients or a graph are recorded, `Fused` runs in its place.
    With `sizes`, the number of original tokens in each, `runs` must have returned true.
    """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns itself where the kernel runs."""
        return self if self.runs(spec, context) else Fused()

    @staticmethod
    def runs(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether there is a kernel for this layer in this context."""
        return any(spec.ranks) and any(spec.reads) and runs_on(context)

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ keys _"]],
    ) -> Float[Tensor, "batch queries features"]:
        """Returns what all heads read out, side by side."""
        sizes, first = None if self.sizes is None else self.sizes(), factors[0].query
        # Autocast hands on less than the float32 that the layer was given.
        if first.shape[1] < FEW_QUERIES or first.dtype != torch.float32:
            return chunked_forward(buckets, factors, values, sizes)
        left, queries, keys = iter(factors), [], []
        for bucket, own in zip(buckets, values, strict=True):
            if bucket.rank:
                query, key = next(left).folded()
            else:
                query, key = own.new_empty(len(own), own.shape[1], first.shape[1], 0), own[..., :0]
            queries.append(query)
            keys.append(key)
        return native_attention(queries, keys, values, sizes, factors[0].scale)
