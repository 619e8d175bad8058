"""The fast backend: one call of scaled_dot_product_attention for all heads that have directions."""

import torch.nn.functional as F

from attnrx.attention.backends.backend import Backend
from attnrx.attention.factors import Bucket, ScoreFactors, padded_buckets
from attnrx.shapes import Float, Tensor


class Fused(Backend):
    """Fused attention: heads padded to one rank, query and key padded to the width of the values.

    The fused kernels of PyTorch want equal widths of query, key and value, and leave for a slower path otherwise. The
    scale is always passed: its default would follow the padded rank.
    """

    def buckets(self, ranks: tuple[int, ...]) -> tuple[Bucket, ...]:
        """Groups all heads that have directions."""
        return padded_buckets(ranks)

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads tokens head_dim"]) -> Tensor:
        """Pads and calls the fused kernel."""
        query, key = factors.folded()
        missing = value.shape[-1] - query.shape[-1]
        if missing > 0:
            query, key = F.pad(query, (0, missing)), F.pad(key, (0, missing))
        return F.scaled_dot_product_attention(query, key, value, scale=factors.scale)
