"""Attention in few operations of a graph, for exported files."""

import torch
import torch.nn.functional as F

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.backend import Backend, TokenSizes, scores
from attnrx.vit.attention.factors import AttentionContext, Bucket, HeadLayout, ScoreFactors, ValueBatch, exact_buckets
from attnrx.vit.spec import AttentionSpec

# Groups of equal heads are computed one by one if they need at most this share of the padded arithmetic. CPU time of
# padded over exact, three heads, 197 tokens, batch 1 and 8, in ONNX Runtime and OpenVINO: 1.07 to 1.27 at a share of
# 0.87, 0.99 to 1.17 at 0.93, 0.93 to 1.00 at 0.97 (one thread of a Xeon with AVX-512, 2026-11-27).
NARROW = 0.95


class Portable(Backend):
    """Scaled dot products of torch, whatever the batch size, the threads and the machine are.

    Neighbouring heads of equal widths are one operation. All heads are padded to one, where that adds little
    arithmetic. Queries and values may have different widths. Keys are weighted by their `sizes`, if given.
    """

    takes_few_queries = True

    def __init__(self, sizes: TokenSizes | None = None):
        self.sizes = sizes

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        # Rank 1 for a head without directions: its zero rows give a uniform map, of keys weighted by their sizes.
        ranks = tuple(max(rank, 1) for rank in spec.ranks)
        rank, width = max(ranks), max((*spec.value_dims, 1))
        if sum(ranks) + sum(spec.value_dims) > NARROW * len(ranks) * (rank + width):
            return (Bucket(0, len(ranks), rank, rank),), (width,) * len(ranks)
        return exact_buckets(ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        if factors.mixture is not None:  # the scores are no single product of two factors
            logits, mask = scores(factors), self._mask(value, None)
            return torch.softmax(logits if mask is None else logits + mask, dim=-1) @ value
        query, key = factors.folded()
        mask = self._mask(query, factors.bias)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factors.scale)

    def _mask(self, like: Tensor, bias: Tensor | None) -> Float[Tensor, "batch heads queries keys"] | None:
        """Returns what is added to the scores: the bias of pairs, and the logarithms of the sizes, -inf for 0."""
        sizes = None if self.sizes is None else self.sizes()
        if sizes is None:
            return bias
        logs = sizes.to(like.dtype).log()[:, None, None]
        return logs if bias is None else bias + logs
