"""Fused attention, the C++ kernel, the choice between them by rule (the default), and attention of exported files."""

import torch
import torch.nn.functional as F

from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention.backends.backend import (
    AttentionContext,
    Backend,
    Bucket,
    BucketValues,
    Eager,
    HeadLayout,
    HeadOutputs,
    ScoreFactors,
    ValueBatch,
    exact_buckets,
    fused_attention,
    has_equal_heads,
    padded_buckets,
)
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.kernels.native_attention import (
    JointFeatures,
    native_attention,
    native_joint_attention,
)
from attnrx.vit.spec import AttentionSpec

# With fewer tokens (of all images together) the launch overhead of every operation exceeds its arithmetic.
FEW_TOKENS = 1024
# A head's keys are transposed once for all its queries; with fewer queries that costs more than it saves.
FEW_QUERIES = 8
# Groups of equal heads are computed one by one if they need at most this share of the padded arithmetic. CPU time of
# padded over exact, three heads, 197 tokens, batch 1 and 8, in ONNX Runtime and OpenVINO: 1.07 to 1.27 at a share of
# 0.87, 0.99 to 1.17 at 0.93, 0.93 to 1.00 at 0.97 (one thread of a Xeon with AVX-512, 2026-11-27).
NARROW = 0.95


class Fused(Backend):
    """Fused attention: heads padded to one rank, query and key padded to the width of the values.

    The fused kernels of PyTorch require equal widths of query, key and value, and fall back to a slow path otherwise.
    The scale is always passed, because its default depends on the padded rank.
    """

    takes_few_queries = True

    # Above this share of the width of the values, projecting fewer rows saves less than it costs to scatter them
    # again: the rows are padded in the weights instead, and the compressed layer runs exactly as the original did. With
    # few tokens there is little arithmetic to save, and the launch overhead of further operations is larger.
    FULL_ABOVE, FULL_ABOVE_WITH_FEW = 0.75, 0.25
    # The kernels load features in steps of this size; a width between two steps is slower than the next step.
    STEP = 8

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups all heads that have directions, at the largest rank, or at full width if that is not slower; queries,
        keys and values have one width.
        """
        width, rank = self.width(spec), max(spec.ranks, default=0)
        limit = self.FULL_ABOVE_WITH_FEW if context.has_fewer_than(FEW_TOKENS) else self.FULL_ABOVE
        # A bucket of rank `width` is padded in the weights, one of a smaller rank after the projection.
        full = spec.keeps_original_norms or rank > limit * width
        return padded_buckets(spec.ranks, width if full else rank, width), (width,) * len(spec.heads)

    @classmethod
    def width(cls, spec: AttentionSpec) -> int:
        """Returns the width of the heads in the kernel."""
        largest, original = max((*spec.ranks, *spec.value_dims, 1)), max(spec.original_rank, spec.head_dim)
        # Rounded up to the next step, but never beyond the width of the original.
        stepped = -(-largest // cls.STEP) * cls.STEP
        return stepped if stepped <= original else largest

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        return has_equal_heads(spec) and self.width(spec) == spec.ranks[0]

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        if type(self).attend is not Fused.attend:  # a subclass computes something else
            return super().attend_fused_qkv(joint)
        return fused_attention(joint, None if joint.bias is None else joint.bias.to(joint.features.dtype))

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        query, key = factors.folded()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=factors.bias, scale=factors.scale)


def runs_on(context: AttentionContext) -> bool:
    """Whether the kernel is built and supports tensors of this context."""
    return context.free_on_cpu and context.dtype == torch.float32 and native_library() is not None


class Native(Eager):
    """Queries, keys and values of any widths, all heads in one call; for inference in float32 on a CPU.

    The kernel is in the wheel, or built with the user's compiler on first use; without one, and while gradients or a
    graph are recorded, `Fused` runs in its place. With `sizes`, `runs` must have returned True.
    """

    takes_few_queries = True

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self if self.runs(spec, context) else Fused()

    @staticmethod
    def runs(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether there is a kernel for this layer in this context."""
        return any(spec.ranks) and any(spec.value_dims) and runs_on(context)

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Pads nothing, unless there are few tokens and each bucket needs operations: then all heads are in one."""
        if not context.has_fewer_than(FEW_TOKENS) or self.takes_fused_qkv(spec, context):
            return super().layout(spec, context)
        rank = max(spec.ranks, default=0)
        return padded_buckets(spec.ranks, rank, rank), (max(spec.value_dims),) * len(spec.heads)

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        # The kernel multiplies rows as they are projected: strengths, shared rows and norms need an operation in
        # between. Rotations and biases are arguments of it.
        has_products = not (
            spec.traits.has_strengths or spec.traits.shares_directions or spec.has_norms or spec.fixes_scores
        )
        return has_products and context.free_on_cpu and int(context.tokens) >= FEW_QUERIES

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        return native_joint_attention(joint, self.token_sizes())

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        first, has_both = factors[0].query, factors[0].mixture is not None and factors[0].bias is not None
        # Under autocast the projections return lower precision than the layer's float32 inputs. No kernel takes both a
        # mixture and a bias.
        if first.shape[1] < FEW_QUERIES or first.dtype != torch.float32 or has_both:
            return super().__call__(buckets, factors, values)
        return native_outputs(buckets, factors, values, self.token_sizes())


def native_outputs(
    buckets: tuple[Bucket, ...],
    factors: tuple[ScoreFactors, ...],
    values: BucketValues,
    sizes: Float[Tensor, "batch keys"] | None,
) -> HeadOutputs:
    """Returns the outputs of all heads, concatenated, from the C++ kernel."""
    mixtures = [factor.mixture for factor in factors if factor.mixture is not None]
    if mixtures:
        return mixtures[0].native_outputs(mixtures, factors[0].scale, values, sizes)
    biases = [part.bias for part in factors if part.bias is not None]
    remaining_factors, queries, keys, tokens = iter(factors), [], [], factors[0].query.shape[1]
    for bucket, value in zip(buckets, values, strict=True):
        if bucket.rank:
            query, key = next(remaining_factors).folded()
        else:  # without query and key features the kernel returns the mean of the values
            query, key = value.new_empty(len(value), value.shape[1], tokens, 0), value[..., :0]
        queries.append(query)
        keys.append(key)
    bias = torch.cat(biases, 1) if biases else None
    return native_attention(queries, keys, values, sizes, factors[0].scale, bias)


class Auto(Fused):
    """Inference on a CPU: the C++ kernel (`Native`); otherwise the fused kernel, which heads that mix the maps of
    blocks never use.
    """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        if Native.runs(spec, context):
            return Native()
        # A fused kernel would compute every head with all shared directions, instead of the map of each block once.
        return Eager() if spec.traits.mixes_blocks else Fused()


class Portable(Eager):
    """Attention in few operations of a graph, for exported files: scaled dot products of torch, whatever the batch
    size, the threads and the machine are.

    Neighbouring heads of equal widths are one operation. All heads are padded to one, where that adds little
    arithmetic. Queries and values may have different widths. Keys are weighted by their `sizes`, if given.
    """

    takes_few_queries = True

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        # Rank 1 for a head without directions: its zero rows give a uniform map, of keys weighted by their sizes.
        ranks = tuple(max(rank, 1) for rank in spec.ranks)
        rank, width = max(ranks), max((*spec.value_dims, 1))
        if sum(ranks) + sum(spec.value_dims) > NARROW * len(ranks) * (rank + width):
            return (Bucket(0, len(ranks), rank, rank),), (width,) * len(ranks)
        return exact_buckets(ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        if factors.mixture is not None:  # the scores are no single product of two factors
            return super().attend(factors, value)
        query, key = factors.folded()
        mask = self.mask(query, factors.bias)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factors.scale)
