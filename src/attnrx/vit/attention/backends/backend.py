"""The base class of backends, which compute the output of the heads from score factors and values; the reference."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.factors import (
    AttentionContext,
    Bucket,
    BucketValues,
    HeadLayout,
    HeadOutputs,
    ScoreFactors,
    ValueBatch,
    exact_buckets,
)
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.spec import AttentionSpec

TokenSizes = Callable[[], Float[Tensor, "batch keys"] | None]
"""Returns the number of original tokens in every token, or None if each is 1."""


class Backend(ABC):
    """Executes softmax(scores) @ value for all heads; every backend equals `Eager` to rounding."""

    watches = False
    """Whether a callback receives every call, which then must hold the whole batch."""

    takes_few_queries = False
    """Whether queries may have fewer tokens than keys and values."""

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
        """Returns the outputs of all heads from the features of one product."""
        raise NotImplementedError

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

    def __init__(self, sizes: TokenSizes | None = None):
        self.sizes = sizes

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups only neighbours of equal shape, so that nothing is padded."""
        return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims

    def token_sizes(self) -> Float[Tensor, "batch keys"] | None:
        return None if self.sizes is None else self.sizes()

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Computes scores (SVDA, Eq. 2), attention (SVDA, Eq. 3) and the weighted sum of the values."""
        logits, sizes = scores(factors), self.token_sizes()
        if sizes is not None:  # a size of 0 becomes the score -inf, so the key has weight zero
            logits = logits + sizes.to(value.dtype).log()[:, None, None]
        return torch.softmax(logits, dim=-1) @ value

    def mean(self, value: ValueBatch) -> Float[Tensor, "batch heads 1 v_head_dim"]:
        sizes = self.token_sizes()
        if sizes is None:
            return super().mean(value)
        return (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)[:, None, None] @ value


def scores(factors: ScoreFactors) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the scores of one bucket, before the softmax (SVDA, Eq. 2)."""
    if factors.mixture is not None:
        products = factors.mixture.scores(factors.scale)
    else:
        # The query is scaled instead of the map, which has more entries where tokens outnumber directions.
        query, key = factors.folded()
        products = (query * factors.scale) @ key.transpose(-1, -2)
    return products if factors.bias is None else products + factors.bias
