"""Attention in few operations of a graph, for exported files."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.backend import Backend, scores
from attnrx.vit.attention.factors import AttentionContext, Bucket, HeadLayout, ScoreFactors, ValueBatch
from attnrx.vit.spec import AttentionSpec


class Portable(Backend):
    """One scaled dot product over all heads, whatever the batch size, the threads and the machine are.

    Heads of different ranks are padded to the largest rank, and to the largest value dimension: a runtime has one fused
    kernel for all heads, and starts several operations for every group of heads otherwise. Queries and values may have
    different widths. `sizes` is that of `Explicit`.
    """

    takes_few_queries = True

    def __init__(self, sizes: Callable[[], Float[Tensor, "batch keys"] | None] | None = None):
        self.sizes = sizes

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Puts all heads into one bucket."""
        # Rank 1 for a layer whose heads have none: its zero rows give uniform maps, of keys weighted by their sizes.
        rank, width = max((*spec.ranks, 1)), max((*spec.value_dims, 1))
        return (Bucket(0, len(spec.ranks), rank, rank),), (width,) * len(spec.heads)

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
