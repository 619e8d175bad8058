"""Backends that pass the attention on: to a token reducer, with tokens weighted by their size, or to an observer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attnrx.support.modules import kept
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.auto import FEW_QUERIES, Native, native_outputs, runs_on
from attnrx.vit.attention.backends.backend import (
    AttentionContext,
    Backend,
    Bucket,
    BucketValues,
    HeadLayout,
    HeadOutputs,
    ScoreFactors,
    TokenSizes,
    ValueBatch,
    fused_attention,
    has_equal_heads,
    scores,
)
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.spec import AttentionSpec


@dataclass(frozen=True)
class CapturedAttention:
    """The captured attention of one layer.

    `attention` are full maps, `class_attention` the rows of the first token, `keys` the mean of the heads' keys, and
    `value_norms` the norms of the values.
    """

    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
    value_norms: Float[Tensor, "batch heads tokens"] | None = None


class AttentionCapture(Backend):
    """Attention over tokens of different sizes, all heads in one padded bucket.

    `sizes` returns the size of every token, or None if all are 1, and `log_sizes` their logarithms; `receive` is called
    with the quantities in `wanted`: "attention", "class_attention", "keys", "value_norms". If neither full maps nor
    gradients of the sizes are needed, a fused kernel is used.
    """

    takes_few_queries = True

    def __init__(
        self,
        sizes: TokenSizes,
        receive: Callable[[CapturedAttention], None],
        wanted: tuple[str, ...],
        log_sizes: TokenSizes | None = None,
    ):
        super().__init__(sizes, log_sizes)
        self.receive, self.wanted = receive, wanted

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns itself, or the C++ kernel if nothing but class attention has to be captured."""
        if self.wanted == ("class_attention",) and NativeCapture.supports(spec, context):
            return NativeCapture(self.sizes, self.receive)
        return Native(self.sizes) if not self.wanted and Native.runs(spec, context) else self

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Puts all heads into one bucket at the width of the values: the fused kernels require equal widths."""
        # Rank 1 for a layer whose heads have none: its zero rows give uniform maps, which can be captured as well.
        rank = max((*spec.ranks, 1))
        width = max((rank, *spec.value_dims))
        return (Bucket(0, len(spec.ranks), rank, width),), (width,) * len(spec.heads)

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        return has_equal_heads(spec)

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        if self.wanted or type(self) is not AttentionCapture or joint.features.device.type == "cpu":
            return super().attend_fused_qkv(joint)
        return fused_attention(joint, self.mask(joint.features, joint.bias))

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        sizes = self.token_sizes()
        query, key = factors.folded()
        # The logarithm of a size 0 is -inf, with an infinite gradient, so sampled sizes do not enter a fused kernel as
        # its mask (see `sized_softmax`). Full maps are never in memory in a fused kernel.
        learned = sizes is not None and sizes.requires_grad and torch.is_grad_enabled()
        if learned or "attention" in self.wanted:
            attention = sized_softmax(scores(factors), sizes)
            self.pass_on(attention, factors, value)
            return attention @ value
        if self.wanted:
            first = None
            if "class_attention" in self.wanted:
                # A fused kernel returns no maps: one row of them, [batch, heads, 1, keys], is computed separately.
                row = (query[:, :, :1] * factors.scale) @ key.transpose(-1, -2)
                first = sized_softmax(row if factors.bias is None else row + factors.bias[:, :, :1], sizes)
            self.pass_on(first, factors, value)
        if query.device.type == "cpu" and query.shape[2] >= FEW_QUERIES and runs_on(AttentionContext.of(value)):
            output = native_outputs((factors.bucket,), (factors,), (value,), sizes)
            # With the heads side by side, and `attend` returns [batch, heads, queries, width].
            return output.unflatten(2, (value.shape[1], -1)).transpose(1, 2)
        if factors.mixture is not None:
            return sized_softmax(scores(factors), sizes) @ value
        mask = self.mask(query, factors.bias)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factors.scale)
        # The export to ONNX decomposes the kernel with a mask into products, whose output has another memory layout.
        return output.contiguous() if factors.bias is not None and torch.compiler.is_exporting() else output

    def pass_on(
        self,
        attention: Float[Tensor, "batch heads queries tokens"] | None,
        factors: ScoreFactors,
        value: ValueBatch,
    ) -> None:
        """Passes the requested quantities to `receive`; the first row of the attention is that of the class token."""
        quantities = {} if attention is None else {"attention": attention, "class_attention": attention[:, :, 0]}
        if "keys" in self.wanted:
            quantities["keys"] = factors.key.mean(2)  # over the heads, [batch, tokens, width]
        if "value_norms" in self.wanted:
            quantities["value_norms"] = value.norm(dim=-1)
        if self.wanted:
            self.receive(CapturedAttention(**{name: quantities[name] for name in self.wanted}))


def capture_uniform(
    capture: AttentionCapture, layer: Any, args: tuple[Any, ...], output: Float[Tensor, "batch tokens width"]
) -> None:
    """Reports uniform attention, as a hook after a layer whose backend captures none: it has no heads, or another one
    computes it.
    """
    (batch, count), spec = output.shape[:2], layer.spec
    uniform = output.new_full((batch, len(spec.heads), count, count), 1 / max(count, 1))
    keys = output.new_zeros(batch, count, max((*spec.ranks, 1)))
    capture.receive(CapturedAttention(uniform, uniform[:, :, 0], keys, uniform[:, :, 0]))


class NativeCapture(Native):
    """The C++ kernel, which returns no attention, beside the attention of the first token, one row per head."""

    def __init__(self, sizes: TokenSizes | None, receive: Callable[[CapturedAttention], None]):
        super().__init__(sizes)
        self.receive = receive

    @staticmethod
    def supports(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether the scores are products of rows, without positions and biases of pairs."""
        plain = spec.form == "dense" and not spec.pair_bias
        return plain and Native.runs(spec, context) and Native().takes_fused_qkv(spec, context)

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self  # `supports` was True; falling back to `Fused`, as `Native` does, would capture nothing

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        features, rows, num_rows = joint.features, tuple(joint.rows), sum(joint.rows)
        query, key = features[:, :1, :num_rows], features[..., num_rows : 2 * num_rows]
        # One product for all heads: their queries are the rows of a block diagonal matrix.
        logits = (query * blocks_of(rows, joint.scale)) @ key.transpose(1, 2)
        self._pass_on(logits)
        return super().attend_fused_qkv(joint)

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        remaining_factors, logits = iter(factors), []
        for bucket, value in zip(buckets, values, strict=True):
            if bucket.rank:
                query, key = next(remaining_factors).folded()
                logits.append(query[:, :, :1] @ key.transpose(-1, -2))
            else:  # scores of zero
                logits.append(value.new_zeros(value.shape[0], value.shape[1], 1, value.shape[2]))
        self._pass_on(torch.cat(logits, dim=1)[:, :, 0] * factors[0].scale)
        return super().__call__(buckets, factors, values)

    def _pass_on(self, logits: Float[Tensor, "batch heads tokens"]) -> None:
        sizes = self.token_sizes()
        if sizes is not None:  # the score of a token of size 0 becomes -inf
            logits = logits + sizes.log()[:, None]
        self.receive(CapturedAttention(class_attention=logits.softmax(-1)))


@kept
def blocks_of(rows: tuple[int, ...], scale: float) -> Float[Tensor, "heads directions"]:
    """Returns the matrix, in float32 on a CPU, that has `scale` where a direction belongs to a head, else 0."""
    return torch.block_diag(*(torch.full((1, count), scale, dtype=torch.float32) for count in rows))


@dataclass(frozen=True)
class Observation:
    """All intermediates of one layer; heads in storage order, directions and value dimensions zero-padded to the
    largest rank.

    `query` and `key` are the rows that enter the scores: divided by their norms if the form has norms, before the
    strength is applied. score = scale * (query * strength) @ key^T, attention = softmax(score), output = attention @
    value; the layer's result is the sum over heads of output @ readout, plus a bias.
    """

    # Padded, so that heads of different ranks fit one tensor; zeros change neither scores nor outputs.
    query: Float[Tensor, "batch tokens heads directions"]
    key: Float[Tensor, "batch tokens heads directions"]
    strength: Float[Tensor, "heads directions"] | None
    scale: float
    scores: Float[Tensor, "batch heads queries keys"]
    attention: Float[Tensor, "batch heads queries keys"]
    value: Float[Tensor, "batch heads keys v_head_dim"]
    output: Float[Tensor, "batch heads queries v_head_dim"]
    readout: Float[Tensor, "heads v_head_dim width"]


class Observed(Backend):
    """Computes as `Eager` does, all heads in one padded bucket, and passes the intermediate results to `observe`.

    A head of rank 0 has zero rows, so its scores are zero and its attention is uniform. In place of a `capture` backend
    it weights tokens by their size and captures the same quantities.
    """

    watches = True

    def __init__(
        self,
        observe: Callable[[Observation], None],
        readout: Float[Tensor, "heads v_head_dim width"],
        capture: AttentionCapture | None = None,
    ):
        super().__init__(None if capture is None else capture.sizes)
        self.observe, self.readout, self.capture = observe, readout, capture

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        rank = max((*spec.ranks, 1))
        return (Bucket(0, len(spec.ranks), rank, rank),), (max((*spec.value_dims, 1)),) * len(spec.heads)

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        logits = scores(factors)
        attention = sized_softmax(logits, self.token_sizes())
        output = attention @ value
        if self.capture is not None:
            self.capture.pass_on(attention, factors, value)
        self.observe(
            Observation(
                # Shared directions have one owner; an observation has one entry per head.
                factors.query.expand(-1, -1, value.shape[1], -1),
                factors.key.expand(-1, -1, value.shape[1], -1),
                factors.strength,
                factors.scale,
                logits,
                attention,
                value,
                output,
                self.readout,
            )
        )
        return output


def sized_softmax(
    logits: Float[Tensor, "batch heads queries keys"], sizes: Float[Tensor, "batch keys"] | None
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the attention in which every key is weighted by its size; a key of size 0 has weight zero.

    The same as adding the logarithm of the size to the scores, -inf for 0, but with a gradient for the sizes that is
    finite everywhere: the score of a key of size zero is clamped to the largest score of the others. That gradient is
    smaller than that of the formula of DynamicViT, which grows exponentially with the scores of such keys.
    """
    if sizes is None or not logits.shape[-1]:
        return torch.softmax(logits, dim=-1)
    weights = sizes[:, None, None, :]
    # Softmax does not depend on the subtracted constant, so it needs no gradient. It is the largest score of the keys
    # that are present; without the clamp a removed key with a larger score could overflow, and infinity * 0 is NaN.
    largest = logits.detach().masked_fill(weights == 0, float("-inf")).amax(-1, keepdim=True)
    weighted = (logits - largest).clamp(max=0.0).exp() * weights
    return weighted / weighted.sum(-1, keepdim=True)
