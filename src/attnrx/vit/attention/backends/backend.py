"""The base class of backends, which compute the output of the heads from score factors and values; the reference."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

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
