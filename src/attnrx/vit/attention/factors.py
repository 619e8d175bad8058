"""The interface between forms and backends: the context of a call, the buckets of heads, the factors of the scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.fixed_weights import has_fixed_weights

ValueBatch = Float[Tensor, "batch heads keys v_head_dim"]
HeadOutputs = Float[Tensor, "batch queries features"]
"""The outputs of all heads, concatenated."""
BucketValues = Sequence[Float[Tensor, "batch _ keys _"]]
"""The values of every bucket, heads first."""


class AttentionContext(NamedTuple):
    """The shape, device and recording state of one call.

    A call is free if nothing of it is recorded: no gradients, no captured graph. Only then may buffers be reused and
    the batch be computed in chunks. In an export for batches of any size the number of images is unknown.
    """

    images: int | torch.SymInt
    tokens: int | torch.SymInt
    device: str
    dtype: torch.dtype
    threads: int
    free: bool

    @classmethod
    def of(cls, tokens: Tensor) -> "AttentionContext":
        """Returns the context of tokens of shape [batch, tokens, width]."""
        # A run that computes the constants of a graph takes the same way as the graph.
        free = not (is_recorded() or has_fixed_weights())
        # A recorded graph must not depend on the threads of the machine that records it.
        threads = torch.get_num_threads() if free else 0
        return cls(tokens.shape[0], tokens.shape[1], tokens.device.type, tokens.dtype, threads, free)

    @property
    def free_on_cpu(self) -> bool:
        return self.free and self.device == "cpu"

    def has_fewer_than(self, count: int) -> bool:
        """Whether all images together are known to have fewer tokens.

        False during export: the result would hold for batches of one size only, and in a strict export (Dynamo) a
        symbolic size is an int.
        """
        if torch.compiler.is_exporting():
            return False
        total = self.images * self.tokens
        return isinstance(total, int) and total < count


@dataclass(frozen=True)
class Bucket:
    """Neighbouring heads that are computed together.

    Every head is projected to `rank` directions, the largest rank of theirs or more, and enters the kernel with `width`
    of them, the last ones zero.
    """

    start: int
    stop: int
    rank: int
    width: int

    @property
    def heads(self) -> slice:
        """The heads of the bucket, in storage order."""
        return slice(self.start, self.stop)


HeadLayout = tuple[tuple[Bucket, ...], tuple[int, ...]]
"""The buckets of the heads, and the padded value dimension of every head."""


class Mixture(ABC):
    """The scores of the heads of one bucket as weighted sums of score maps that all heads share."""

    @abstractmethod
    def scores(self, scale: float) -> Float[Tensor, "batch heads queries keys"]:
        """Returns the scores of the heads."""

    @abstractmethod
    def native_outputs(
        self, mixtures: Sequence[Any], scale: float, values: BucketValues, sizes: Float[Tensor, "batch keys"] | None
    ) -> HeadOutputs:
        """Returns the outputs of the heads of all buckets, by their mixtures, from the C++ kernel."""


@dataclass(frozen=True)
class ScoreFactors:
    """The factors of one bucket's scores: score[i, j] = scale * sum_r strength[r] query[i, r] key[j, r].

    The rows of query and key are divided by their norms, and rotated, already where the form does that; `strength` is
    None where it is one. There are as many owners as heads, or a single one of directions that all heads share. With
    `mixture` fewer operations give the same scores, as weighted sums of maps that heads share. `bias` is added to the
    scores, if given, of all images or of each.
    """

    bucket: Bucket
    query: Float[Tensor, "batch queries owners width"]
    key: Float[Tensor, "batch keys owners width"]
    strength: Float[Tensor, "heads width"] | None
    scale: float
    mixture: Mixture | None = None
    bias: Float[Tensor, "images heads queries keys"] | None = None

    def folded(self) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns query and key for the fused kernels: heads first, the strength multiplied into the query."""
        # Fused kernels have no diagonal between query and key: a strength is folded into one side. It differs by head,
        # so shared rows [batch, tokens, 1, width] get as many heads as it has; the keys only by a view.
        query = self.query if self.strength is None else self.query * self.strength.to(self.query.dtype)
        key = self.key if self.strength is None else self.key.expand(-1, -1, query.shape[2], -1)
        return query.transpose(1, 2), key.transpose(1, 2)


def exact_buckets(ranks: tuple[int, ...], value_dims: tuple[int, ...] | None = None) -> tuple[Bucket, ...]:
    """Groups neighbouring heads of equal rank and equal value dimension, so that nothing is padded."""
    buckets: list[Bucket] = []
    for head, rank in enumerate(ranks):
        if buckets and buckets[-1].rank == rank and (value_dims is None or value_dims[head] == value_dims[head - 1]):
            buckets[-1] = Bucket(buckets[-1].start, head + 1, rank, rank)
        else:
            buckets.append(Bucket(head, head + 1, rank, rank))
    return tuple(buckets)


def padded_buckets(ranks: tuple[int, ...], rank: int, width: int) -> tuple[Bucket, ...]:
    """Groups neighbouring heads that have any directions, at one rank and width; heads of rank 0 are not grouped."""
    # Equal numbers are one bucket: all ranks above 0 are replaced by the common rank before they are grouped.
    grouped = exact_buckets(tuple(rank if head_rank else 0 for head_rank in ranks))
    return tuple(replace(bucket, width=width) if bucket.rank else bucket for bucket in grouped)
