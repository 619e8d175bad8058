"""The contract of a backend: how score factors and values become the output of the heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Backend(ABC):
    """Executes softmax(scores) @ value for all heads; every backend equals `Eager` to rounding."""

    watches = False
    """Whether a callback receives every call, which then must hold the whole batch."""

    takes_few_queries = False
    """Whether it takes queries of fewer tokens than keys and values."""

    @abstractmethod
    def buckets(self, spec: AttentionSpec, context: AttentionContext) -> tuple[Bucket, ...]:
        """Chooses which neighbouring heads are computed together, and at which padded rank."""

    def at(self, spec: AttentionSpec, context: AttentionContext) -> "Backend":
        """Returns the backend that computes in this context: itself, unless it only chooses."""
        return self

    def reads(self, spec: AttentionSpec, context: AttentionContext) -> tuple[int, ...]:
        """Chooses how many features every head's values are padded to, the same for all heads of a bucket."""
        return spec.reads

    @abstractmethod
    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads keys reads"]) -> Tensor:
        """Returns the output of one bucket's heads, for every query as wide as their values."""

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        values: Sequence[Float[Tensor, "batch _ keys _"]],
    ) -> Float[Tensor, "batch queries features"]:
        """Returns what all heads read out, side by side, from the values of every bucket.

        A head without directions returns the mean of its values, zero where there are no keys.
        """
        left, outputs = iter(factors), []
        for bucket, own in zip(buckets, values, strict=True):
            if bucket.rank:
                outputs.append(self.attend(next(left), own))
            else:
                queries = factors[0].query.shape[1] if factors else own.shape[2]
                outputs.append(mean_of(own).expand(-1, -1, queries, -1))
        flat = [output.transpose(1, 2).flatten(2) for output in outputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


def mean_of(value: Float[Tensor, "batch heads keys reads"]) -> Float[Tensor, "batch heads 1 reads"]:
    """Returns the mean over the keys; zero where there are none, as softmax over no key times no value is."""
    return value.mean(-2, keepdim=True) if value.shape[2] else value.new_zeros(*value.shape[:2], 1, value.shape[3])
