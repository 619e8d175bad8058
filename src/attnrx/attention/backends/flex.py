"""FlexAttention: PyTorch's generated kernels, with independent widths of queries and values."""

from collections.abc import Callable
from functools import lru_cache

import torch

from attnrx.attention.backends.auto import Auto
from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import unfused
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors, padded_buckets
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Flex(Backend):
    """One call of torch.nn.attention.flex_attention for all heads that have directions; compiled on first use.

    Queries and keys have the largest rank, values the largest value dimension. `Auto` runs where the generated kernels
    are not available (gradients on a CPU, float64, torch without them).
    """

    takes_few_queries = True
    LEAST = 16  # the smallest head dimension of the generated kernels

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns itself if the kernels exist, else `Auto`."""
        on_cpu_with_gradients = context.device == "cpu" and torch.is_grad_enabled()
        if on_cpu_with_gradients or context.dtype == torch.float64 or flex_attention() is None:
            return Auto().at(spec, context)
        return self

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Groups all heads that have directions, at the largest rank."""
        most = spec.original_rank if spec.keeps_original_norms else max((*spec.ranks, self.LEAST))
        return padded_buckets(spec.ranks, most, most)

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Returns one width for all values."""
        return (max((*spec.reads, self.LEAST)),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Calls the generated kernel; an empty set of keys is handled without it."""
        if not value.shape[2]:
            return unfused(*factors.folded(), value, factors.scale)
        query, key = (side.contiguous() for side in factors.folded())
        run = flex_attention()
        assert run is not None
        return run(query, key, value.contiguous(), scale=factors.scale)


def flex_attention() -> Callable[..., Tensor] | None:
    """Returns FlexAttention, compiled unless the whole model is being compiled; None if torch does not have it."""
    plain = _plain()
    if plain is None or torch.compiler.is_compiling():
        return plain
    return _compiled()


@lru_cache(maxsize=1)
def _plain() -> Callable[..., Tensor] | None:
    try:
        from torch.nn.attention import flex_attention as module
    except ImportError:
        return None
    return module.flex_attention  # type: ignore[return-value]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_plain(), dynamic=False)  # type: ignore[return-value]
