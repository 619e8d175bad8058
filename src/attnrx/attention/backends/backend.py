"""The contract of a backend: how score factors and values become the output of the heads."""

from abc import ABC, abstractmethod

import torch

from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


class Backend(ABC):
    """Executes softmax(scores) @ value for all heads; every backend equals `Eager` to rounding."""

    @abstractmethod
    def buckets(self, spec: AttentionSpec, tokens: int) -> tuple[Bucket, ...]:
        """Chooses which neighbouring heads are computed together, and at which padded rank, for so many tokens of all
        images together.
        """

    def reads(self, spec: AttentionSpec) -> int:
        """Chooses to how many features the values of every head are padded."""
        return max((*spec.reads, 1))

    @abstractmethod
    def attend(self, factors: ScoreFactors, value: Float[Tensor, "batch heads tokens reads"]) -> Tensor:
        """Gives the output of one bucket's heads, in the shape of their values."""

    def __call__(
        self,
        buckets: tuple[Bucket, ...],
        factors: tuple[ScoreFactors, ...],
        value: Float[Tensor, "batch heads tokens reads"],
    ) -> Float[Tensor, "batch heads tokens reads"]:
        """Gives the output of all heads; a head without directions reads out the mean of the values."""
        found = {part.bucket: part for part in factors}
        outputs = []
        for bucket in buckets:
            own = value[:, bucket.heads]
            if bucket in found:
                outputs.append(self.attend(found[bucket], own))
            else:
                outputs.append(own.mean(-2, keepdim=True).expand_as(own))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
