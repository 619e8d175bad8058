"""The reference backend: unfused and unpadded."""

import torch

from attnrx.attention.backends.backend import Backend
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors, exact_buckets
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Eager(Backend):
    """The reference: scores, softmax, weighted sum of the values."""

    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Groups only neighbours of equal shape."""
        return exact_buckets(spec.ranks, self.reads(spec, context))

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Pads values only if heads share their directions, which puts them into one bucket."""
        return (max(spec.reads, default=0),) * len(spec.heads) if spec.shares_directions else spec.reads

    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Computes scores (Eq. 2), attention (Eq. 3) and the weighted sum of the values."""
        return torch.softmax(scores(factors), dim=-1) @ value


def scores(factors: ScoreFactors) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the scores of one bucket, before the softmax (Eq. 2)."""
    query, key = factors.folded()
    return (query @ key.transpose(-1, -2)) * factors.scale
