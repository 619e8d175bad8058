"""The C++ kernel: every head at its own rank, without a map in memory."""

from collections.abc import Sequence

import torch

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import Explicit, chunked_attention
from attnrx.attention.backends.fused import Fused
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.kernels.compilation import native_library
from attnrx.attention.kernels.native import native_attention
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec

# A head's keys are transposed once for all its queries; with fewer queries that costs more than it saves.
FEW_QUERIES = 8


def runs_on(context: AttentionContext) -> bool:
    """Whether the kernel is built and supports tensors of this context."""
    return context.free_on_cpu and context.dtype == torch.float32 and native_library() is not None


class Native(Explicit):
    """Queries, keys and values of any widths, all heads in one call; for inference in float32 on a CPU.

    Heads are grouped as by `Explicit`. The kernel is built with the user's compiler on first use (`native_library`);
    without one, and while gradients or a graph are recorded, `Fused` runs in its place. With `sizes`, the number of
    original tokens in each token, `runs` must have returned True.
    """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns itself if the kernel runs, else `Fused`."""
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
        """Returns the outputs of all heads, concatenated."""
        sizes, first = None if self.sizes is None else self.sizes(), factors[0].query
        # Under autocast the projections return lower precision than the layer's float32 inputs.
        if first.shape[1] < FEW_QUERIES or first.dtype != torch.float32:
            return chunked_attention(buckets, factors, values, sizes)
        left, queries, keys = iter(factors), [], []
        for bucket, own in zip(buckets, values, strict=True):
            if bucket.rank:
                query, key = next(left).folded()
            else:
                query, key = own.new_empty(len(own), own.shape[1], first.shape[1], 0), own[..., :0]
            queries.append(query)
            keys.append(key)
        return native_attention(queries, keys, values, sizes, factors[0].scale)
