"""The fast backend: one call of scaled_dot_product_attention for all heads that have directions."""

import torch.nn.functional as F

from attnrx.attention.backends.backend import Backend
from attnrx.attention.factors import Bucket, ScoreFactors, padded_buckets
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Fused(Backend):
    """Fused attention: heads padded to one rank, query and key padded to the width of the values.

    The fused kernels of PyTorch want equal widths of query, key and value, and leave for a slower path otherwise. The
    scale is always passed: its default would follow the padded rank.
    """

    # Above this share of the width of the values, padding the projections (which costs nothing beyond the original's
    # work) is faster than projecting fewer rows and padding what they give (which costs a copy of query and key).
    FULL_ABOVE = 0.75

    def buckets(self, spec: AttentionSpec) -> tuple[Bucket, ...]:
        """Groups all heads that have directions, at the largest rank, or at full width where that is not slower."""
        most = max(spec.ranks, default=0)
        full = spec.norms == "original" or most > self.FULL_ABOVE * spec.head_dim
        return padded_buckets(spec.ranks, max(most, spec.head_dim) if full else most)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads tokens head_dim"]) -> Tensor:
        """Pads and calls the fused kernel."""
        query, key = factors.folded()
        missing = value.shape[-1] - query.shape[-1]
        if missing > 0:
            query, key = F.pad(query, (0, missing)), F.pad(key, (0, missing))
        return F.scaled_dot_product_attention(query, key, value, scale=factors.scale)
