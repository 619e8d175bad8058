"""Attention written out for inference: every head at its own rank, nothing padded, one map at a time in the cache."""

import torch

from attnrx.attention.backends.backend import Backend
from attnrx.attention.factors import Bucket, ScoreFactors, exact_buckets
from attnrx.attention.occasion import Occasion
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec
from attnrx.tokens import CACHED


class Explicit(Backend):
    """Scores, softmax and read-out as three steps, which take queries and values of any two widths.

    The fused kernels of PyTorch want one width for both on a CPU. Below it this does less arithmetic, at the price of
    a map that is written and read once; in parts that fit the cache that is little.
    """

    takes_few_queries = True

    def buckets(self, spec: AttentionSpec, occasion: Occasion) -> tuple[Bucket, ...]:
        """Groups only neighbours of equal shape."""
        return exact_buckets(spec.ranks, self.reads(spec, occasion))

    def reads(self, spec: AttentionSpec, occasion: Occasion) -> tuple[int, ...]:
        """Pads nothing, unless all heads must stay together because they share their directions."""
        return (max(spec.reads),) * len(spec.heads) if spec.form == "shared" else spec.reads

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes scores, attention and the read-out."""
        query, key = factors.folded()
        return written_out(query, key, value, factors.scale)


def written_out(
    query: Float[Tensor, "batch heads queries width"],
    key: Float[Tensor, "batch heads keys width"],
    value: Float[Tensor, "batch heads keys reads"],
    scale: float,
) -> Float[Tensor, "batch heads queries reads"]:
    """Gives softmax(scale * query @ key^T) @ value; where nothing is recorded, as many images at once as fit the cache.

    That is one image, unless its maps are small: of one image, heads and tokens can be read and written in place.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or query.device.type != "cpu":
        return torch.softmax((query * scale) @ key.transpose(-1, -2), dim=-1) @ value
    (batch, heads, tokens, reads), queries = value.shape, query.shape[2]
    # In the order in which the output projection reads it, so that nothing has to be moved afterwards.
    output = value.new_empty(batch, queries, heads, reads).transpose(1, 2)
    together = max(CACHED // max(2 * heads * queries * tokens * value.element_size(), 1), 1)
    nothing = query.new_empty(())
    for start in range(0, batch, together):
        own = slice(start, start + together)
        q, k, v = (side[own].flatten(0, 1) for side in (query, key, value))
        scores = torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=scale)
        attention = torch.softmax(scores, dim=-1, out=scores)
        if together == 1:
            torch.bmm(attention, v, out=output[start])
        else:
            output[own] = torch.bmm(attention, v).unflatten(0, (-1, heads))
    return output
