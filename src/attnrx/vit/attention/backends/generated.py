"""Backends of generated kernels: PyTorch's FlexAttention, and one launch of Triton for heads of all ranks."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.auto import Auto
from attnrx.vit.attention.backends.backend import Backend
from attnrx.vit.attention.backends.explicit import unfused
from attnrx.vit.attention.factors import (
    AttentionContext,
    Bucket,
    HeadLayout,
    ScoreFactors,
    ValueBatch,
    exact_buckets,
    padded_buckets,
)
from attnrx.vit.kernels.ragged_launch import ragged_attention
from attnrx.vit.spec import AttentionSpec


class Flex(Backend):
    """One call of torch.nn.attention.flex_attention for all heads that have directions; compiled on first use.

    Queries and keys have the largest rank, values the largest value dimension. `Auto` runs where the generated kernels
    are not available (gradients on a CPU, float64).
    """

    takes_few_queries = True
    LEAST = 16  # the smallest head dimension of the generated kernels

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        on_cpu_with_gradients = context.device == "cpu" and torch.is_grad_enabled()
        if on_cpu_with_gradients or spec.pair_bias or context.dtype == torch.float64:
            return Auto().at(spec, context)
        return self

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        # With original norms every row is projected anyway, and the removed directions have strength zero.
        width = spec.original_rank if spec.keeps_original_norms else max((*spec.ranks, self.LEAST))
        return padded_buckets(spec.ranks, width, width), (max((*spec.value_dims, self.LEAST)),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Calls the generated kernel; an empty set of keys is handled without it."""
        if not value.shape[2]:
            return unfused(*factors.folded(), value, factors.scale)
        query, key = (side.contiguous() for side in factors.folded())
        return flex_attention()(query, key, value.contiguous(), scale=factors.scale)


def flex_attention() -> Callable[..., Tensor]:
    """Returns FlexAttention, compiled unless the whole model is being compiled."""
    # Uncompiled, FlexAttention materializes the maps; inside torch.compile it is traced with the model.
    return _plain() if torch.compiler.is_compiling() else _compiled()


def _plain() -> Callable[..., Tensor]:
    # Imported on first use, because it takes long.
    from torch.nn.attention import flex_attention as module

    return module.flex_attention  # type: ignore[return-value]


@lru_cache(maxsize=1)  # one compiled function for all layers, so that layers of equal shape share a kernel
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_plain(), dynamic=False)  # type: ignore[return-value]


class Ragged(Backend):
    """Every head at its own rank, values of any width, all in one launch; for inference on CUDA.

    While gradients or a graph are recorded, for shared directions, in float64 and on a CPU, `Auto` runs in its place.
    In Triton's interpreter (TRITON_INTERPRET=1) it runs on any device, slowly; the tests use that.
    """

    def __init__(self, anywhere: bool = False):
        self.anywhere = anywhere

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        runs = (self.anywhere or context.device == "cuda") and context.free and context.dtype != torch.float64
        fits = not spec.shares_directions and not spec.pair_bias and any(spec.ranks) and any(spec.value_dims)
        return self if runs and fits else Auto().at(spec, context)

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups only neighbours of equal shape; the kernel takes all groups at once."""
        return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Computes one bucket alone, unfused."""
        return unfused(*factors.folded(), value, factors.scale)

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ tokens _"]],
    ) -> Float[Tensor, "batch tokens features"]:
        # The kernel takes all heads of a token side by side, [batch, tokens, sum of widths], and finds each by the
        # ranks; heads of rank 0 have no columns of query and key.
        value = _side_by_side(values)
        sides = [part.folded() for part in factors]
        ranks = tuple(bucket.rank for bucket in buckets for _ in range(bucket.start, bucket.stop))
        value_dims = tuple(part.shape[-1] for part in values for _ in range(part.shape[1]))
        query, key = (_side_by_side([side[which] for side in sides]) for which in (0, 1))
        return ragged_attention(query, key, value, ranks, value_dims, factors[0].scale)


def _side_by_side(parts: Sequence[Float[Tensor, "batch _ tokens _"]]) -> Float[Tensor, "batch tokens features"]:
    flat = [part.transpose(1, 2).flatten(2) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)
