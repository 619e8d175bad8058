"""Backends, which compute the output of the heads from score factors and values: their base class, the reference, and
what forms give them (buckets of heads, factors of the scores).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.fixed_weights import has_fixed_weights
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.spec import AttentionSpec

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


TokenSizes = Callable[[], Float[Tensor, "batch keys"] | None]
"""Returns the number of original tokens in every token, or None if each is 1."""


class Backend(ABC):
    """Executes softmax(scores) @ value for all heads; every backend equals `Eager` to rounding."""

    watches = False
    """Whether a callback receives every call, which then must hold the whole batch."""

    takes_few_queries = False
    """Whether queries may have fewer tokens than keys and values."""

    def __init__(self, sizes: TokenSizes | None = None, log_sizes: TokenSizes | None = None):
        """`sizes` weight the keys, where the backend takes them; `log_sizes` are their logarithms."""
        self.sizes, self.log_sizes = sizes, log_sizes

    def token_sizes(self) -> Float[Tensor, "batch keys"] | None:
        return None if self.sizes is None else self.sizes()

    def mask(
        self, like: Float[Tensor, "*_"], bias: Float[Tensor, "_ _ queries keys"] | None
    ) -> Float[Tensor, "batch _ _ keys"] | None:
        """Returns what is added to the scores: the bias of pairs, and the logarithms of the sizes, -inf for 0."""
        bias = None if bias is None else bias.to(like.dtype)
        sizes = self.token_sizes()
        if sizes is None:
            return bias
        # A pruned token has the score -inf. The prefix tokens are never pruned, so every row has a finite score.
        logs = sizes.to(like.dtype).log() if self.log_sizes is None else self.log_sizes()
        assert logs is not None
        mask = logs.to(like.dtype)[:, None, None]
        return mask if bias is None else bias + mask

    @abstractmethod
    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Returns the neighbouring heads that are computed together, with their padded rank, and the padded value
        dimension of every head, equal for all heads of a bucket.
        """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> "Backend":
        """Returns the backend that computes in this context: itself, unless it delegates."""
        return self

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether `attend_fused_qkv` computes this layer: its scores have no strengths and no norms."""
        return False

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        """Returns the outputs of all heads from the features of one product; here of heads of equal widths."""
        features, heads = joint.features, len(joint.rows)
        # [batch, tokens, heads, width] each: views of the features.
        query, key, value = features.view(*features.shape[:2], 3, heads, -1).unbind(2)
        bias = None if joint.bias is None else joint.bias.to(features.dtype)
        bucket = Bucket(0, heads, joint.rows[0], joint.rows[0])
        factors = ScoreFactors(bucket, query, key, None, joint.scale, bias=bias)
        return self.attend(factors, value.transpose(1, 2)).transpose(1, 2).flatten(2)

    @abstractmethod
    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Returns the output of one bucket's heads, at the width of their values."""

    def mean(self, value: ValueBatch) -> Float[Tensor, "batch heads 1 v_head_dim"]:
        """Returns the mean over the keys, the output of heads without directions; zero if there are no keys."""
        # The mean over an empty axis is NaN; softmax over no keys times no values is zero.
        return value.mean(-2, keepdim=True) if value.shape[2] else value.new_zeros(*value.shape[:2], 1, value.shape[3])

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        """Returns the outputs of all heads, concatenated, from the values of every bucket."""
        # Buckets of rank 0 have values and no factors, so the factors are consumed separately.
        remaining_factors, outputs = iter(factors), []
        for bucket, value in zip(buckets, values, strict=True):
            if bucket.rank:
                outputs.append(self.attend(next(remaining_factors), value))
            else:
                # Scores of zero are uniform attention: the same mean for every query, without a product of tokens.
                queries = factors[0].query.shape[1] if factors else value.shape[2]
                outputs.append(self.mean(value).expand(-1, -1, queries, -1))
        # [batch, heads, queries, width] to [batch, queries, heads * width], the input of the output projection.
        flat = [output.transpose(1, 2).flatten(2) for output in outputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


class Eager(Backend):
    """The reference: scores, softmax, weighted sum of the values; keys are weighted by their `sizes`, if given."""

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups only neighbours of equal shape, so that nothing is padded."""
        return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Computes scores (SVDA, Eq. 2), attention (SVDA, Eq. 3) and the weighted sum of the values."""
        logits, mask = scores(factors), self.mask(value, None)
        return torch.softmax(logits if mask is None else logits + mask, dim=-1) @ value

    def mean(self, value: ValueBatch) -> Float[Tensor, "batch heads 1 v_head_dim"]:
        sizes = self.token_sizes()
        if sizes is None:
            return super().mean(value)
        return (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)[:, None, None] @ value


def has_equal_heads(spec: AttentionSpec) -> bool:
    """Whether scores are products of the projected rows, and all heads have as many rows as value dimensions."""
    is_product = spec.form == "dense" and not (spec.has_norms or spec.fixes_scores)
    return is_product and len({*spec.ranks, *spec.value_dims}) == 1 and spec.attends


def fused_attention(joint: JointFeatures, mask: Float[Tensor, "images _ _ keys"] | None) -> HeadOutputs:
    """Returns the outputs of heads of equal widths by the fused kernel of PyTorch, in the fewest views of the features;
    `mask` is added to the scores.
    """
    batch, tokens, _ = joint.features.shape
    heads = joint.features.view(batch, tokens, 3, len(joint.rows), -1).permute(2, 0, 3, 1, 4).unbind()
    outputs = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=joint.scale)
    return outputs.transpose(1, 2).flatten(2)


def scores(factors: ScoreFactors) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the scores of one bucket, before the softmax (SVDA, Eq. 2)."""
    if factors.mixture is not None:
        products = factors.mixture.scores(factors.scale)
    else:
        # The query is scaled instead of the map, which has more entries where tokens outnumber directions.
        query, key = factors.folded()
        products = (query * factors.scale) @ key.transpose(-1, -2)
    return products if factors.bias is None else products + factors.bias
