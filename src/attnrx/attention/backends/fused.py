"""The fused backend: one call of scaled_dot_product_attention for all heads that have directions."""

import torch.nn.functional as F

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import FEW_TOKENS
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors, padded_buckets
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Fused(Backend):
    """Fused attention: heads padded to one rank, query and key padded to the width of the values.

    The fused kernels of PyTorch require equal widths of query, key and value, and fall back to a slow path otherwise.
    The scale is always passed, because its default depends on the padded rank.
    """

    takes_few_queries = True

    # Above this share of the width of the values, projecting fewer rows saves less than it costs to scatter them
    # again: the rows are padded in the weights instead, and the compressed layer runs exactly as the original did. With
    # few tokens there is little arithmetic to save, and the launch overhead of further operations is larger.
    FULL_ABOVE, FULL_ABOVE_WITH_FEW = 0.75, 0.25
    # The kernels load features in steps of this size; a width between two steps is slower than the next step.
    STEP = 8

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Groups all heads that have directions, at the largest rank, or at full width if that is not slower."""
        most, width = max(spec.ranks, default=0), self.reads(spec, context)[0]
        limit = self.FULL_ABOVE_WITH_FEW if context.has_fewer_than(FEW_TOKENS) else self.FULL_ABOVE
        full = spec.keeps_original_norms or most > limit * width
        return padded_buckets(spec.ranks, width if full else most, width)

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Returns one width for queries, keys and values."""
        width, whole = max((*spec.ranks, *spec.reads, 1)), max(spec.original_rank, spec.head_dim)
        stepped = -(-width // self.STEP) * self.STEP
        return (stepped if stepped <= whole else width,) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Calls the fused kernel."""
        query, key = factors.folded()
        return F.scaled_dot_product_attention(query, key, value, scale=factors.scale)
