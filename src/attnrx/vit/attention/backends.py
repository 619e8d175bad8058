"""Backends, which compute the outputs of the heads from score factors and values, in buckets of heads.

Most of them differ only in how they compute: the reference (`Eager`), fused attention, the C++ kernel, `Auto` (the
default), which chooses one of these, and attention for exported files (`Portable`). Others also pass the attention to a
token reducer, which weights tokens by their size, or to an observer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attnrx.support.modules import has_fixed_weights, is_recorded, kept
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.kernels.native_attention import JointFeatures, native_attention, native_joint_attention
from attnrx.vit.spec import AttentionSpec

# With fewer tokens (of all images together), the launch overhead of an operation exceeds its arithmetic.
FEW_TOKENS = 1024
# A head's keys are transposed once for all its queries. With fewer queries, this costs more than it saves.
FEW_QUERIES = 8
# Groups of equal heads are computed one by one if they need at most this share of the padded arithmetic. Measured ratio
# of CPU times, padded to exact groups: 1.07 to 1.27 at a share of 0.87, 0.99 to 1.17 at 0.93, 0.93 to 1.00 at 0.97
# (three heads, 197 tokens, batch 1 and 8, ONNX Runtime and OpenVINO, one thread of a Xeon with AVX-512, 2026-11-27).
NARROW = 0.95

ValueBatch = Float[Tensor, "batch heads keys v_head_dim"]
HeadOutputs = Float[Tensor, "batch queries features"]
"""The outputs of all heads, concatenated."""
BucketValues = Sequence[Float[Tensor, "batch _ keys _"]]
"""The values of every bucket, heads first."""


class AttentionContext(NamedTuple):
    """The shape, device and recording state of one call.

    `free` is true if the call records neither gradients nor a graph. Only then may buffers be reused and the batch be
    computed in chunks. In an export for batches of any size, the number of images is unknown.
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
        # A run that computes the constants of a graph must take the same path as the graph.
        free = not (is_recorded() or has_fixed_weights())
        # A recorded graph must not depend on the threads of the machine that records it.
        threads = torch.get_num_threads() if free else 0
        return cls(tokens.shape[0], tokens.shape[1], tokens.device.type, tokens.dtype, threads, free)

    @property
    def free_on_cpu(self) -> bool:
        return self.free and self.device == "cpu"

    def has_fewer_than(self, count: int) -> bool:
        """Whether all images together certainly have fewer than `count` tokens.

        It is False during export, because True would fix the batch size. In a strict export (Dynamo), a symbolic size
        is an int.
        """
        if torch.compiler.is_exporting():
            return False
        total = self.images * self.tokens
        return isinstance(total, int) and total < count


@dataclass(frozen=True)
class Bucket:
    """Neighbouring heads that are computed together.

    Every head is projected to `rank` directions, which is at least the largest rank among them. It enters the kernel
    with `width` directions, padded with zeros at the end.
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
    """The scores of one bucket's heads, computed as weighted sums of score maps that all heads share."""

    @abstractmethod
    def scores(self, scale: float) -> Float[Tensor, "batch heads queries keys"]:
        """Returns the scores of the heads."""

    @abstractmethod
    def native_outputs(
        self, mixtures: Sequence[Any], scale: float, values: BucketValues, sizes: Float[Tensor, "batch keys"] | None
    ) -> HeadOutputs:
        """Returns the outputs of all buckets' heads, which the C++ kernel computes from their mixtures."""


@dataclass(frozen=True)
class GridScores:
    """Terms that are added to the scores of keys in a grid. A query has one number per row and one per column."""

    rows: Float[Tensor, "batch heads queries rows"]
    columns: Float[Tensor, "batch heads queries columns"]

    def added(self) -> Float[Tensor, "batch heads queries keys"]:
        return (self.rows[..., None] + self.columns[..., None, :]).flatten(3)

    def features(
        self, scale: float
    ) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns features of queries and keys. Their product, times the scale, is added to the scores."""
        numbers = torch.cat([self.rows, self.columns], -1) * (1 / scale)
        sizes = self.rows.shape[-1], self.columns.shape[-1]
        places = places_in_grid(*sizes, numbers.dtype, numbers.device)
        # Fused kernels load features in steps, so the width is rounded up.
        added = -sum(sizes) % Fused.STEP
        return F.pad(numbers, (0, added)), F.pad(places, (0, added)).expand(*numbers.shape[:2], -1, -1)


@kept
def places_in_grid(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "tokens lines"]:
    """Returns ones at the row and at the column of every token in a grid, in row-major order."""
    of_rows, of_columns = (torch.eye(size, dtype=dtype, device=device) for size in (rows, columns))
    return torch.cat([of_rows.repeat_interleave(columns, 0), of_columns.repeat(rows, 1)], 1)


@dataclass(frozen=True)
class ScoreFactors:
    """The factors of one bucket's scores: score[i, j] = scale * sum_r strength[r] query[i, r] key[j, r].

    Forms that normalize or rotate the rows of query and key have already done so. `strength` is None if all strengths
    are one. There is one owner per head, or only one if all heads share directions. A `mixture` computes the
    same scores with fewer operations, as weighted sums of maps that heads share. `bias` and `grid`, if not None, are
    added to the scores. `bias` is for all images, or for each image.
    """

    bucket: Bucket
    query: Float[Tensor, "batch queries owners width"]
    key: Float[Tensor, "batch keys owners width"]
    strength: Float[Tensor, "heads width"] | None
    scale: float
    mixture: Mixture | None = None
    bias: Float[Tensor, "images heads queries keys"] | None = None
    grid: GridScores | None = None

    def folded(self) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns query and key for the fused kernels: `sides`, plus the features of `grid`."""
        query, key = self.sides()
        if self.grid is None:
            return query, key
        of_queries, of_keys = self.grid.features(self.scale)
        return torch.cat([query, of_queries], -1), torch.cat([key, of_keys], -1)

    def sides(self) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns query and key, heads first, with the strength multiplied into the query."""
        # Fused kernels have no diagonal between query and key, so the strength is multiplied into the query. It differs
        # by head, so shared rows [batch, tokens, 1, width] are repeated for all heads. For keys, a view is enough.
        query = self.query if self.strength is None else self.query * self.strength.to(self.query.dtype)
        key = self.key if self.strength is None else self.key.expand(-1, -1, query.shape[2], -1)
        return query.transpose(1, 2), key.transpose(1, 2)


def exact_buckets(ranks: tuple[int, ...], value_dims: tuple[int, ...] | None = None) -> tuple[Bucket, ...]:
    """Groups neighbouring heads of equal rank and equal value dimension, without padding."""
    buckets: list[Bucket] = []
    for head, rank in enumerate(ranks):
        if buckets and buckets[-1].rank == rank and (value_dims is None or value_dims[head] == value_dims[head - 1]):
            buckets[-1] = Bucket(buckets[-1].start, head + 1, rank, rank)
        else:
            buckets.append(Bucket(head, head + 1, rank, rank))
    return tuple(buckets)


def padded_buckets(ranks: tuple[int, ...], rank: int, width: int) -> tuple[Bucket, ...]:
    """Groups neighbouring heads that have directions, at one rank and width. Heads of rank 0 are not grouped."""
    # All ranks above 0 are replaced by the common rank, because equal ranks form one bucket.
    grouped = exact_buckets(tuple(rank if head_rank else 0 for head_rank in ranks))
    return tuple(replace(bucket, width=width) if bucket.rank else bucket for bucket in grouped)


TokenSizes = Callable[[], Float[Tensor, "batch keys"] | None]
"""Returns how many original tokens each token represents, or None if each represents one."""


class Backend(ABC):
    """Executes softmax(scores) @ value for all heads. Up to rounding, every backend returns the same as `Eager`."""

    watches = False
    """Whether a callback receives every call. Then a call must contain the whole batch."""

    takes_few_queries = False
    """Whether queries may have fewer tokens than keys and values."""

    def __init__(self, sizes: TokenSizes | None = None, log_sizes: TokenSizes | None = None):
        """`sizes` weight the keys in backends that use them. `log_sizes` are their logarithms."""
        self.sizes, self.log_sizes = sizes, log_sizes

    def token_sizes(self) -> Float[Tensor, "batch keys"] | None:
        return None if self.sizes is None else self.sizes()

    def mask(
        self, like: Float[Tensor, "*_"], bias: Float[Tensor, "_ _ queries keys"] | None
    ) -> Float[Tensor, "batch _ _ keys"] | None:
        """Returns what is added to the scores: the bias of pairs, and the logarithm of each size (-inf for size 0)."""
        bias = None if bias is None else bias.to(like.dtype)
        sizes = self.token_sizes()
        if sizes is None:
            return bias
        # A pruned token has the score -inf. Prefix tokens are never pruned, so every row has a finite score.
        logs = sizes.to(like.dtype).log() if self.log_sizes is None else self.log_sizes()
        assert logs is not None
        mask = logs.to(like.dtype)[:, None, None]
        return mask if bias is None else bias + mask

    @abstractmethod
    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Returns the buckets of neighbouring heads, and every head's padded value dimension.

        All heads in a bucket have the same padded value dimension.
        """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> "Backend":
        """Returns the backend that computes in this context. It is the backend itself, unless it delegates."""
        return self

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether `attend_fused_qkv` can compute this layer. The scores must have no strengths and no norms."""
        return False

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        """Returns the outputs of all heads from the features of one product. Heads must have equal widths here."""
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
        """Returns the mean of the values, weighted by the sizes of the keys. It is zero if there are no keys.

        Heads without directions return this mean.
        """
        sizes = self.token_sizes()
        if sizes is not None:
            return (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)[:, None, None] @ value
        # The mean over an empty axis is NaN, but softmax over no keys times no values is zero.
        return value.mean(-2, keepdim=True) if value.shape[2] else value.new_zeros(*value.shape[:2], 1, value.shape[3])

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        """Returns the concatenated outputs of all heads, from the values of every bucket."""
        # Buckets of rank 0 have values but no factors, so the factors are consumed separately.
        remaining_factors, outputs = iter(factors), []
        for bucket, value in zip(buckets, values, strict=True):
            if bucket.rank:
                outputs.append(self.attend(next(remaining_factors), value))
            else:
                # Scores of zero mean uniform attention, so every query gets the same mean, without a product.
                queries = factors[0].query.shape[1] if factors else value.shape[2]
                outputs.append(self.mean(value).expand(-1, -1, queries, -1))
        # [batch, heads, queries, width] to [batch, queries, heads * width], the input of the output projection.
        flat = [output.transpose(1, 2).flatten(2) for output in outputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


class Eager(Backend):
    """The reference: scores, softmax, weighted sum of the values. `sizes`, if not None, weight the keys."""

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups only neighbours of equal shape, so nothing is padded."""
        return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Computes scores (SVDA, Eq. 2), attention (SVDA, Eq. 3) and the weighted sum of the values."""
        logits, mask = scores(factors), self.mask(value, None)
        return torch.softmax(logits if mask is None else logits + mask, dim=-1) @ value


def has_equal_heads(spec: AttentionSpec) -> bool:
    """Whether scores are plain products of projected rows, and all ranks and value dimensions are the same number."""
    is_product = spec.form == "dense" and not (spec.has_norms or spec.fixes_scores)
    return is_product and len({*spec.ranks, *spec.value_dims}) == 1 and spec.attends


def fused_attention(joint: JointFeatures, mask: Float[Tensor, "images _ _ keys"] | None) -> HeadOutputs:
    """Returns the outputs of heads of equal widths, computed by PyTorch's fused kernel with as few views as possible.

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
        # The query is scaled, not the map, because the map is larger if there are more tokens than directions.
        query, key = factors.sides()
        products = (query * factors.scale) @ key.transpose(-1, -2)
    if factors.grid is not None:
        products = products + factors.grid.added()
    return products if factors.bias is None else products + factors.bias


class Fused(Backend):
    """Fused attention with all heads padded to one rank, and query and key padded to the width of the values.

    PyTorch's fused kernels require equal widths of query, key and value, and otherwise fall back to a slow path.
    The scale is always passed, because its default depends on the padded rank.
    """

    takes_few_queries = True

    # Projecting fewer rows saves arithmetic, but scattering them again costs time. If the rank is above this share of
    # the values' width, the costs are larger. The rows are then padded in the weights, and the compressed layer runs
    # exactly like the original. With few tokens there is little arithmetic to save, so the share is smaller.
    FULL_ABOVE, FULL_ABOVE_WITH_FEW = 0.75, 0.25
    # The kernels load features in steps of this size. A width between two steps is slower than the next step.
    STEP = 8

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups all heads that have directions. Queries, keys and values have one width.

        The heads are padded to the largest rank, or to the full width if that is not slower.
        """
        width, rank = self.width(spec), max(spec.ranks, default=0)
        limit = self.FULL_ABOVE_WITH_FEW if context.has_fewer_than(FEW_TOKENS) else self.FULL_ABOVE
        # A bucket of rank `width` is padded in the weights. A bucket of smaller rank is padded after the projection.
        full = spec.keeps_original_norms or rank > limit * width
        return padded_buckets(spec.ranks, width if full else rank, width), (width,) * len(spec.heads)

    @classmethod
    def width(cls, spec: AttentionSpec) -> int:
        """Returns the width of the heads in the kernel."""
        largest, original = max((*spec.ranks, *spec.value_dims, 1)), max(spec.original_rank, spec.head_dim)
        # Rounded up to the next step, but not beyond the original width.
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
    """Whether the kernel is built, and supports tensors of this context."""
    return context.free_on_cpu and context.dtype == torch.float32 and native_library() is not None


class Native(Eager):
    """Queries, keys and values of any widths, all heads in one call, for inference in float32 on a CPU.

    The wheel contains the kernel, or the user's compiler builds it on first use. Without a kernel, or while gradients
    or a graph are recorded, `Fused` runs instead. Pass `sizes` only after `runs` has returned True.
    """

    takes_few_queries = True

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self if self.runs(spec, context) else Fused()

    @staticmethod
    def runs(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether there is a kernel for this layer in this context."""
        return any(spec.ranks) and any(spec.value_dims) and runs_on(context)

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Pads nothing, unless there are few tokens and each bucket needs operations. Then all heads are one bucket."""
        if not context.has_fewer_than(FEW_TOKENS) or self.takes_fused_qkv(spec, context):
            return super().layout(spec, context)
        rank = max(spec.ranks, default=0)
        return padded_buckets(spec.ranks, rank, rank), (max(spec.value_dims),) * len(spec.heads)

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        # The kernel multiplies the projected rows directly, so a layer with strengths, shared rows or norms needs
        # operations in between. Rotations and biases are arguments of the kernel.
        has_products = not (
            spec.traits.has_strengths
            or spec.traits.shares_directions
            or spec.traits.has_distances
            or spec.has_norms
            or spec.fixes_scores
        )
        return has_products and context.free_on_cpu and int(context.tokens) >= FEW_QUERIES

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        return native_joint_attention(joint, self.token_sizes())

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        first, has_both = factors[0].query, factors[0].mixture is not None and factors[0].bias is not None
        # Under autocast, projections return a lower precision than the layer's float32 inputs. No kernel takes both a
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
    """Returns the concatenated outputs of all heads from the C++ kernel."""
    mixtures = [factor.mixture for factor in factors if factor.mixture is not None]
    if mixtures:
        return mixtures[0].native_outputs(mixtures, factors[0].scale, values, sizes)
    biases = [part.bias for part in factors if part.bias is not None]
    remaining_factors, queries, keys, tokens = iter(factors), [], [], factors[0].query.shape[1]
    for bucket, value in zip(buckets, values, strict=True):
        if bucket.rank:
            query, key = next(remaining_factors).folded()
        else:  # without features of queries and keys, the kernel returns the mean of the values
            query, key = value.new_empty(len(value), value.shape[1], tokens, 0), value[..., :0]
        queries.append(query)
        keys.append(key)
    bias = torch.cat(biases, 1) if biases else None
    return native_attention(queries, keys, values, sizes, factors[0].scale, bias)


class Auto(Fused):
    """Chooses the C++ kernel (`Native`) for inference on a CPU, and a fused kernel otherwise.

    Heads that mix the maps of blocks never use the fused kernel.
    """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        if Native.runs(spec, context):
            return Native()
        # A fused kernel would compute every head from all shared directions, not each block's map once.
        return Eager() if spec.traits.mixes_blocks else Fused()


class Portable(Eager):
    """Attention in few graph operations, for exported files. It uses torch's scaled dot products.

    The graph is the same for all batch sizes, threads and machines. Neighbouring heads of equal widths are one
    operation. If padding all heads to one width adds little arithmetic, all heads are one operation. Queries and values
    may have different widths. `sizes`, if not None, weight the keys.
    """

    takes_few_queries = True

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        # A head without directions gets rank 1. Its zero rows result in a uniform map, with keys weighted by size.
        ranks = tuple(max(rank, 1) for rank in spec.ranks)
        rank, width = max(ranks), max((*spec.value_dims, 1))
        if sum(ranks) + sum(spec.value_dims) > NARROW * len(ranks) * (rank + width):
            return (Bucket(0, len(ranks), rank, rank),), (width,) * len(ranks)
        return exact_buckets(ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        if factors.mixture is not None:  # the scores are not a single product of two factors
            return super().attend(factors, value)
        query, key = factors.folded()
        mask = self.mask(query, factors.bias)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factors.scale)


@dataclass(frozen=True)
class CapturedAttention:
    """The captured attention of one layer.

    `attention` are full maps, and `class_attention` their rows of the first token. `keys` are the mean over the heads'
    keys, and `value_norms` the norms of the values.
    """

    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
    value_norms: Float[Tensor, "batch heads tokens"] | None = None


class AttentionCapture(Backend):
    """Attention over tokens of different sizes, with all heads in one padded bucket.

    `sizes` returns the size of every token, or None if all are 1, and `log_sizes` their logarithms. The backend calls
    `receive` with the quantities in `wanted`: "attention", "class_attention", "keys", "value_norms". If neither full
    maps nor gradients of the sizes are needed, it uses a fused kernel.
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
        """Returns itself, or the C++ kernel if at most class attention has to be captured."""
        if self.wanted == ("class_attention",) and NativeCapture.supports(spec, context):
            return NativeCapture(self.sizes, self.receive)
        return Native(self.sizes) if not self.wanted and Native.runs(spec, context) else self

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Puts all heads into one bucket of the values' width, because the fused kernels require equal widths."""
        # If no head has directions, rank 1 is used. Its zero rows result in uniform maps, which can also be captured.
        rank = max((*spec.ranks, 1))
        width = max((rank, *spec.value_dims))
        return (Bucket(0, len(spec.ranks), rank, width),), (width,) * len(spec.heads)

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        return has_equal_heads(spec)

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        if self.wanted or joint.features.device.type == "cpu":
            return super().attend_fused_qkv(joint)
        return fused_attention(joint, self.mask(joint.features, joint.bias))

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        sizes = self.token_sizes()
        query, key = factors.folded()
        # The logarithm of size 0 is -inf and has an infinite gradient, so sampled sizes cannot be the mask of a fused
        # kernel (see `sized_softmax`). Besides, a fused kernel never has full maps in memory.
        learned = sizes is not None and sizes.requires_grad and torch.is_grad_enabled()
        if learned or "attention" in self.wanted:
            attention = sized_softmax(scores(factors), sizes)
            self.pass_on(attention, factors, value)
            return attention @ value
        if self.wanted:
            first = None
            if "class_attention" in self.wanted:
                # A fused kernel returns no maps, so one of their rows, [batch, heads, 1, keys], is computed separately.
                row = (query[:, :, :1] * factors.scale) @ key.transpose(-1, -2)
                first = sized_softmax(row if factors.bias is None else row + factors.bias[:, :, :1], sizes)
            self.pass_on(first, factors, value)
        if query.device.type == "cpu" and query.shape[2] >= FEW_QUERIES and runs_on(AttentionContext.of(value)):
            output = native_outputs((factors.bucket,), (factors,), (value,), sizes)
            # `native_outputs` returns the heads side by side, but `attend` returns [batch, heads, queries, width].
            return output.unflatten(2, (value.shape[1], -1)).transpose(1, 2)
        if factors.mixture is not None:
            return sized_softmax(scores(factors), sizes) @ value
        mask = self.mask(query, factors.bias)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=factors.scale)
        # The ONNX export decomposes the kernel with a mask into products, whose output has another memory layout.
        return output.contiguous() if factors.bias is not None and torch.compiler.is_exporting() else output

    def pass_on(
        self, attention: Float[Tensor, "batch heads queries tokens"] | None, factors: ScoreFactors, value: ValueBatch
    ) -> None:
        """Passes the requested quantities to `receive`. The first row of the attention belongs to the class token."""
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
    """Passes uniform attention to `receive`, as a hook after a layer whose backend captures nothing.

    Such layers have no heads, or another backend computes them.
    """
    (batch, count), spec = output.shape[:2], layer.spec
    uniform = output.new_full((batch, len(spec.heads), count, count), 1 / max(count, 1))
    keys = output.new_zeros(batch, count, max((*spec.ranks, 1)))
    capture.receive(CapturedAttention(uniform, uniform[:, :, 0], keys, uniform[:, :, 0]))


class NativeCapture(Native):
    """The C++ kernel, which returns no attention, plus the attention of the first token with one row per head."""

    def __init__(self, sizes: TokenSizes | None, receive: Callable[[CapturedAttention], None]):
        super().__init__(sizes)
        self.receive = receive

    @staticmethod
    def supports(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether the scores are products of rows, without positions and without biases of token pairs."""
        plain = spec.form == "dense" and not spec.pair_bias
        return plain and Native.runs(spec, context) and Native().takes_fused_qkv(spec, context)

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self  # not `Fused`, to which `Native` may fall back: it would capture nothing

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        features, rows, num_rows = joint.features, tuple(joint.rows), sum(joint.rows)
        query, key = features[:, :1, :num_rows], features[..., num_rows : 2 * num_rows]
        # One product computes all heads, because their queries form a block diagonal matrix.
        logits = (query * rows_by_head(rows, joint.scale)) @ key.transpose(1, 2)
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
def rows_by_head(rows: tuple[int, ...], scale: float) -> Float[Tensor, "heads directions"]:
    """Returns a float32 matrix on the CPU that has `scale` where a direction belongs to a head, and 0 elsewhere."""
    return torch.block_diag(*(torch.full((1, count), scale, dtype=torch.float32) for count in rows))


@dataclass(frozen=True)
class Observation:
    """All intermediate results of one layer, with heads in storage order.

    Directions and value dimensions are zero-padded to the largest rank. `query` and `key` are the rows that enter the
    scores, before the strength is applied. If the form has norms, the rows are already divided by them. Then score =
    scale * (query * strength) @ key^T, attention = softmax(score), and output = attention @ value. The layer's result
    is the sum over heads of output @ readout, plus a bias.
    """

    # Padded, because heads of different ranks must fit one tensor. Zeros change neither scores nor outputs.
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
    """Computes like `Eager`, with all heads in one padded bucket, and passes the intermediate results to `observe`.

    A head of rank 0 has zero rows, so its scores are zero and its attention is uniform. If it replaces a `capture`
    backend, it weights tokens by their size and captures the same quantities.
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
                # Shared directions have one owner, but an observation has one entry per head.
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
    """Returns the attention in which every key is weighted by its size. A key of size 0 has weight zero.

    Adding the logarithm of the size to the scores (-inf for 0) would return the same. Here, however, the gradient for
    the sizes is finite everywhere, because a size-zero key's score is clamped to the largest score of the other keys.
    The gradient is smaller than in DynamicViT's formula (Rao et al., 2021), where it grows exponentially with the
    scores of removed keys.
    """
    if sizes is None or not logits.shape[-1]:
        return torch.softmax(logits, dim=-1)
    weights = sizes[:, None, None, :]
    # Softmax does not depend on the subtracted constant, which therefore needs no gradient. The constant is the largest
    # score of the keys that are present. Without the clamp, a removed key's larger score could overflow, and infinity
    # * 0 is NaN.
    largest = logits.detach().masked_fill(weights == 0, float("-inf")).amax(-1, keepdim=True)
    weighted = (logits - largest).clamp(max=0.0).exp() * weights
    return weighted / weighted.sum(-1, keepdim=True)
