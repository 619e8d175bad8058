"""One launch for heads of all ranks: a Triton kernel that pads nothing."""

from collections.abc import Sequence

import torch

from attnrx.attention.backends.auto import Auto
from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import unfused
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors, exact_buckets
from attnrx.attention.kernels.ragged_launch import ragged_attention
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Ragged(Backend):
    """Every head at its own rank, values of any width, all in one launch; for inference on CUDA.

    While gradients or a graph are recorded, for shared directions, in float64 and on a CPU, `Auto` runs in its place.
    In Triton's interpreter (TRITON_INTERPRET=1) it runs on any device, slowly; the tests use that.
    """

    def __init__(self, anywhere: bool = False):
        self.anywhere = anywhere

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns itself if the kernel runs, else `Auto`."""
        runs = (self.anywhere or context.device == "cuda") and context.free and context.dtype != torch.float64
        fits = not spec.shares_directions and any(spec.ranks) and any(spec.reads)
        return self if runs and fits else Auto().at(spec, context)

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Groups only neighbours of equal shape; the kernel takes all groups at once."""
        return exact_buckets(spec.ranks, self.reads(spec, context))

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes one bucket alone, unfused."""
        return unfused(*factors.folded(), value, factors.scale)

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ tokens _"]],
    ) -> Float[Tensor, "batch tokens features"]:
        """Returns the outputs of all heads, concatenated."""
        value = _side_by_side(values)
        sides = [part.folded() for part in factors]
        ranks = tuple(bucket.rank for bucket in buckets for _ in range(bucket.start, bucket.stop))
        reads = tuple(own.shape[-1] for own in values for _ in range(own.shape[1]))
        query, key = (_side_by_side([side[which] for side in sides]) for which in (0, 1))
        return ragged_attention(query, key, value, ranks, reads, factors[0].scale)[0]


def _side_by_side(parts: Sequence[Float[Tensor, "batch _ tokens _"]]) -> Float[Tensor, "batch tokens features"]:
    flat = [part.transpose(1, 2).flatten(2) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)
