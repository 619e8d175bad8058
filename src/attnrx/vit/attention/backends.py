"""Attention backends, which compute the outputs of the heads from score factors and values.

A backend divides the heads into groups (buckets), and computes all heads of a bucket at once. `Eager` is the reference.
`Fused` calls PyTorch's fused kernels, and `Native` calls the C++ kernel. `Auto`, the default, chooses one of these
three. `Portable` is for exported files. `AttentionCapture` also sends the attention to a token reducer, and `Observed`
sends it to an observer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attnrx.support.modules import has_fixed_weights, is_recorded, kept
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.kernels.compilation import native_library
from attnrx.vit.kernels.native_attention import JointFeatures, native_attention, native_joint_attention
from attnrx.vit.spec import AttentionSpec

# A batch with fewer tokens (summed over its images) spends more time on launching operations than on arithmetic.
FEW_TOKENS = 1024
# The C++ kernel transposes a head's keys once for all its queries. With fewer queries, this costs more than it saves.
FEW_QUERIES = 8
# `Portable` computes groups of equal heads one by one if they need at most this share of the arithmetic of padded
# heads. Measured CPU times of padded heads, divided by the times of exact groups: 1.07 to 1.27 at a share of 0.87, 0.99
# to 1.17 at 0.93, 0.93 to 1.00 at 0.97 (three heads, 197 tokens, batch 1 and 8, ONNX Runtime and OpenVINO, one thread
# of a Xeon with AVX-512, 2026-11-27).
NARROW = 0.95

ValueBatch = Float[Tensor, "batch heads keys v_head_dim"]
HeadOutputs = Float[Tensor, "batch queries features"]
"""The outputs of all heads, concatenated."""
BucketValues = Sequence[Float[Tensor, "batch _ keys _"]]
"""One tensor of values per bucket, with the heads before the keys."""


class AttentionContext(NamedTuple):
    """The input shape, device, dtype and thread count of one call of a layer, and whether the call is recorded.

    `free` is true if neither gradients nor a graph are recorded. Only then can layers cache plans and use
    kernels that compute no gradients. In an export for any batch size, `images` is symbolic.
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
        # A run with fixed weights computes the constants for a graph, so it must use the same operations as the graph.
        free = not (is_recorded() or has_fixed_weights())
        # A recorded graph must not depend on how many threads the recording machine has.
        threads = torch.get_num_threads() if free else 0
        return cls(tokens.shape[0], tokens.shape[1], tokens.device.type, tokens.dtype, threads, free)

    @property
    def free_on_cpu(self) -> bool:
        return self.free and self.device == "cpu"

    def has_fewer_than(self, count: int) -> bool:
        """Whether the whole batch certainly has fewer than `count` tokens.

        Returns False during export, because a comparison would fix the batch size in the graph.
        """
        # In a strict export (Dynamo), a symbolic size is an int, so `isinstance` below would not detect it.
        if torch.compiler.is_exporting():
            return False
        total = self.images * self.tokens
        return isinstance(total, int) and total < count


@dataclass(frozen=True)
class Bucket:
    """Neighbouring heads that a backend computes together, from index `start` up to, but not including, `stop`.

    Tokens are projected to `rank` query and key features per head, at least as many as the head's own rank. These
    features are then padded with zeros to `width` for the attention kernel.
    """

    start: int
    stop: int
    rank: int
    width: int

    @property
    def heads(self) -> slice:
        """The bucket's heads, as a slice of the heads in storage order."""
        return slice(self.start, self.stop)


HeadLayout = tuple[tuple[Bucket, ...], tuple[int, ...]]
"""A layer's buckets, and the padded value dimension of every head."""


class Mixture(ABC):
    """The attention scores of a bucket, as weighted sums of a few score maps that all its heads share."""

    @abstractmethod
    def scores(self, scale: float) -> Float[Tensor, "batch heads queries keys"]:
        """Returns the attention scores of every head, multiplied by `scale`."""

    @abstractmethod
    def native_outputs(
        self, mixtures: Sequence[Any], scale: float, values: BucketValues, sizes: Float[Tensor, "batch keys"] | None
    ) -> HeadOutputs:
        """Computes the outputs of all heads with the C++ kernel, from one mixture per bucket."""


@dataclass(frozen=True)
class GridScores:
    """Relative position scores for keys in a grid, stored as one score per grid row and one per grid column.

    The position score of a key is the sum of the scores of its row and its column. `kept` contains the index of every
    key in the grid, or is None if all tokens of the grid are keys.
    """

    rows: Float[Tensor, "batch heads queries rows"]
    columns: Float[Tensor, "batch heads queries columns"]
    kept: Int[Tensor, "batch keys"] | None = None

    def added(self) -> Float[Tensor, "batch heads queries keys"]:
        whole = (self.rows[..., None] + self.columns[..., None, :]).flatten(3)
        if self.kept is None:
            return whole
        return whole.gather(3, self.kept[:, None, None].expand(*whole.shape[:3], -1))

    def features(
        self, scale: float
    ) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns extra query and key features, whose dot product times `scale` is the relative position score.

        With them, fused kernels compute the relative position scores together with the other scores.
        """
        numbers = torch.cat([self.rows, self.columns], -1) * (1 / scale)
        sizes = self.rows.shape[-1], self.columns.shape[-1]
        places = places_in_grid(*sizes, numbers.dtype, numbers.device)
        # Fused kernels load features in steps of `Fused.STEP`, so the width is rounded up to a multiple.
        added = -sum(sizes) % Fused.STEP
        places = F.pad(places, (0, added))
        of_keys = places if self.kept is None else places[self.kept][:, None]
        return F.pad(numbers, (0, added)), of_keys.expand(*numbers.shape[:2], -1, -1)


@kept
def places_in_grid(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "tokens lines"]:
    """Returns, for every token in a grid (row by row), its one-hot row and its one-hot column, concatenated."""
    of_rows, of_columns = (torch.eye(size, dtype=dtype, device=device) for size in (rows, columns))
    return torch.cat([of_rows.repeat_interleave(columns, 0), of_columns.repeat(rows, 1)], 1)


@dataclass(frozen=True)
class ScoreFactors:
    """The factors of one bucket's scores: score[i, j] = scale * sum_r strength[r] query[i, r] key[j, r].

    `query` and `key` are already normalized and rotated, if the attention form does so. Their `owners` axis has one
    entry per head, or a single entry if all heads share directions. `strength` is None if all strengths are 1. If there
    is a `mixture`, it computes the same scores with fewer operations. `bias` and `grid` are added to the scores if they
    are not None. The first axis of `bias` has size 1 if all images share the bias.
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
        """Returns query and key for kernels that compute plain dot products, with the features of `grid` appended."""
        query, key = self.sides()
        if self.grid is None:
            return query, key
        of_queries, of_keys = self.grid.features(self.scale)
        return torch.cat([query, of_queries], -1), torch.cat([key, of_keys], -1)

    def sides(self) -> tuple[Float[Tensor, "batch heads queries width"], Float[Tensor, "batch heads keys width"]]:
        """Returns query and key with the head axis first. The query is multiplied by the strength."""
        # Fused kernels compute plain dot products, so the query is multiplied by the strength. Strengths differ by
        # head, so the product repeats shared rows [batch, tokens, 1, width] for all heads. For keys, a view is enough.
        query = self.query if self.strength is None else self.query * self.strength.to(self.query.dtype)
        key = self.key if self.strength is None else self.key.expand(-1, -1, query.shape[2], -1)
        return query.transpose(1, 2), key.transpose(1, 2)


def exact_buckets(ranks: tuple[int, ...], value_dims: tuple[int, ...] | None = None) -> tuple[Bucket, ...]:
    """Groups neighbouring heads with equal rank and equal value dimension, so that no head needs padding."""
    buckets: list[Bucket] = []
    for head, rank in enumerate(ranks):
        if buckets and buckets[-1].rank == rank and (value_dims is None or value_dims[head] == value_dims[head - 1]):
            buckets[-1] = Bucket(buckets[-1].start, head + 1, rank, rank)
        else:
            buckets.append(Bucket(head, head + 1, rank, rank))
    return tuple(buckets)


def padded_buckets(ranks: tuple[int, ...], rank: int, width: int) -> tuple[Bucket, ...]:
    """Groups neighbouring heads with ranks above 0 into buckets that are padded to `rank` and `width`.

    Heads of rank 0 form separate buckets without padding.
    """
    # `exact_buckets` groups equal ranks, so all ranks above 0 are replaced by the common rank.
    grouped = exact_buckets(tuple(rank if head_rank else 0 for head_rank in ranks))
    return tuple(replace(bucket, width=width) if bucket.rank else bucket for bucket in grouped)


TokenSizes = Callable[[], Float[Tensor, "batch keys"] | None]
"""A function that returns how many original tokens each token represents, or None if each represents only itself."""


class Backend(ABC):
    """Base class of backends, which compute softmax(scores) @ value for all heads.

    All backends return the same outputs as `Eager`, up to rounding.
    """

    watches = False
    """Whether the backend passes intermediate results to a callback. Callers must then not divide the batch."""

    takes_few_queries = False
    """Whether the backend accepts fewer query tokens than key tokens."""

    def __init__(self, sizes: TokenSizes | None = None, log_sizes: TokenSizes | None = None):
        """Stores two functions: `sizes` returns token sizes that weight the keys, and `log_sizes` their logarithms."""
        self.sizes, self.log_sizes = sizes, log_sizes

    def token_sizes(self) -> Float[Tensor, "batch keys"] | None:
        return None if self.sizes is None else self.sizes()

    def mask(
        self, like: Float[Tensor, "*_"], bias: Float[Tensor, "_ _ queries keys"] | None
    ) -> Float[Tensor, "batch _ _ keys"] | None:
        """Returns what is added to the scores: the sum of the bias and the logarithms of the token sizes.

        The logarithm of size 0 is -inf. Returns None if there is neither a bias nor a token size.
        """
        bias = None if bias is None else bias.to(like.dtype)
        sizes = self.token_sizes()
        if sizes is None:
            return bias
        # Pruned tokens get the score -inf. Prefix tokens are never pruned, so every row keeps a finite score.
        logs = sizes.to(like.dtype).log() if self.log_sizes is None else self.log_sizes()
        assert logs is not None
        mask = logs.to(like.dtype)[:, None, None]
        return mask if bias is None else bias + mask

    @abstractmethod
    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Returns the buckets of neighbouring heads, and every head's value dimension after padding.

        All heads in a bucket are padded to the same value dimension.
        """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> "Backend":
        """Returns the backend that runs calls in this context, e.g. the backend that `Auto` chooses.

        Most backends return themselves.
        """
        return self

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether `attend_fused_qkv` can compute this layer. Layers with strengths or norms are not supported."""
        return False

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        """Returns the outputs of all heads from the jointly projected queries, keys and values.

        The implementation in this base class requires heads of equal widths.
        """
        features, heads = joint.features, len(joint.rows)
        # Query, key and value are views of the features, [batch, tokens, heads, width] each.
        query, key, value = features.view(*features.shape[:2], 3, heads, -1).unbind(2)
        bias = None if joint.bias is None else joint.bias.to(features.dtype)
        bucket = Bucket(0, heads, joint.rows[0], joint.rows[0])
        factors = ScoreFactors(bucket, query, key, None, joint.scale, bias=bias)
        return self.attend(factors, value.transpose(1, 2)).transpose(1, 2).flatten(2)

    @abstractmethod
    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Returns the outputs of one bucket's heads, [batch, heads, queries, v_head_dim]."""

    def mean(self, value: ValueBatch) -> Float[Tensor, "batch heads 1 v_head_dim"]:
        """Returns the mean of the values, weighted by the token sizes, or zeros if there are no keys.

        A head of rank 0 has uniform attention, so this mean is its output for every query.
        """
        sizes = self.token_sizes()
        if sizes is not None:
            return (sizes / sizes.sum(-1, keepdim=True)).to(value.dtype)[:, None, None] @ value
        # The mean over an empty axis would be NaN, but attention without keys must return zero.
        return value.mean(-2, keepdim=True) if value.shape[2] else value.new_zeros(*value.shape[:2], 1, value.shape[3])

    def __call__(
        self, buckets: tuple[Bucket, ...], factors: tuple[ScoreFactors, ...], values: BucketValues
    ) -> HeadOutputs:
        """Returns the concatenated outputs of all heads. `values` contains one tensor per bucket.

        `factors` contains entries only for buckets with ranks above 0.
        """
        # Buckets of rank 0 have values but no factors, so the two sequences are not zipped.
        remaining_factors, outputs = iter(factors), []
        for bucket, value in zip(buckets, values, strict=True):
            if bucket.rank:
                outputs.append(self.attend(next(remaining_factors), value))
            else:
                # Scores of zero mean uniform attention, so every query gets the mean of the values.
                queries = factors[0].query.shape[1] if factors else value.shape[2]
                outputs.append(self.mean(value).expand(-1, -1, queries, -1))
        # Reshapes [batch, heads, queries, width] to [batch, queries, heads * width] for the output projection.
        flat = [output.transpose(1, 2).flatten(2) for output in outputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


class Eager(Backend):
    """The reference backend, which computes scores, softmax and the weighted sum of the values in separate steps.

    If tokens have sizes, each key is weighted by its size.
    """

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups neighbouring heads with equal rank and equal value dimension, so that no head is padded."""
        return exact_buckets(spec.ranks, spec.value_dims), spec.value_dims

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        """Computes the scores (SVDA, Eq. 2), the attention (SVDA, Eq. 3) and the weighted sum of the values."""
        logits, mask = scores(factors), self.mask(value, None)
        return torch.softmax(logits if mask is None else logits + mask, dim=-1) @ value


def has_equal_heads(spec: AttentionSpec) -> bool:
    """Whether scores are plain dot products, and all heads have the same rank, which is also their value dimension."""
    is_product = spec.form == "dense" and not (spec.has_norms or spec.fixes_scores)
    return is_product and len({*spec.ranks, *spec.value_dims}) == 1 and spec.attends


def fused_attention(joint: JointFeatures, mask: Float[Tensor, "images _ _ keys"] | None) -> HeadOutputs:
    """Computes attention for heads of equal widths with PyTorch's fused kernel, and returns the heads' outputs.

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
        # Scaling the queries is cheaper than scaling the scores, because there are fewer directions than keys.
        query, key = factors.sides()
        products = (query * factors.scale) @ key.transpose(-1, -2)
    if factors.grid is not None:
        products = products + factors.grid.added()
    return products if factors.bias is None else products + factors.bias


class Fused(Backend):
    """PyTorch's fused attention, with all heads padded to one width.

    Query, key and value are padded to the same width, because PyTorch's fused kernels are slow if their widths differ.
    The scale is always passed explicitly, because PyTorch's default depends on the padded width.
    """

    takes_few_queries = True

    # Projecting fewer rows saves arithmetic, but padding the projected features costs time. If the rank is above this
    # share of the width, padding the features costs more than it saves. The weights are padded instead, so the layer
    # runs like the original layer. With few tokens there is little arithmetic to save, so the share is smaller.
    FULL_ABOVE, FULL_ABOVE_WITH_FEW = 0.75, 0.25
    # Fused kernels load features in steps of this size. A width between two steps is slower than the next step.
    STEP = 8

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Pads the queries, keys and values of all heads with ranks above 0 to one width.

        The projections are padded to the largest rank, or to the full width if the full width is not slower.
        """
        width, rank = self.width(spec), max(spec.ranks, default=0)
        limit = self.FULL_ABOVE_WITH_FEW if context.has_fewer_than(FEW_TOKENS) else self.FULL_ABOVE
        # For a bucket of rank `width`, the weights are padded. For a smaller rank, the projected features are padded.
        full = spec.keeps_original_norms or rank > limit * width
        return padded_buckets(spec.ranks, width if full else rank, width), (width,) * len(spec.heads)

    @classmethod
    def width(cls, spec: AttentionSpec) -> int:
        """Returns the width to which all heads are padded for the kernel."""
        largest, original = max((*spec.ranks, *spec.value_dims, 1)), max(spec.original_rank, spec.head_dim)
        # The width is rounded up to the next step, but never above the original width.
        stepped = -(-largest // cls.STEP) * cls.STEP
        return stepped if stepped <= original else largest

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        return has_equal_heads(spec) and self.width(spec) == spec.ranks[0]

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        if type(self).attend is not Fused.attend:  # a subclass may compute something different
            return super().attend_fused_qkv(joint)
        return fused_attention(joint, None if joint.bias is None else joint.bias.to(joint.features.dtype))

    def attend(self, factors: ScoreFactors, value: ValueBatch) -> Tensor:
        query, key = factors.folded()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=factors.bias, scale=factors.scale)


def runs_on(context: AttentionContext) -> bool:
    """Whether the C++ kernel is available, and the context is float32 inference on a CPU."""
    return context.free_on_cpu and context.dtype == torch.float32 and native_library() is not None


class Native(Eager):
    """The C++ kernel for float32 inference on a CPU, which computes all heads in one call.

    Queries, keys and values may have different widths. Wheels contain the compiled kernel. In other installations, the
    user's compiler builds it on first use. `Fused` runs instead if there is no kernel, or while gradients or a graph
    are recorded. Because `Fused` ignores token sizes, pass `sizes` only after `runs` has returned True.
    """

    takes_few_queries = True

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self if self.runs(spec, context) else Fused()

    @staticmethod
    def runs(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether the C++ kernel can compute this layer in this context."""
        return any(spec.ranks) and any(spec.value_dims) and runs_on(context)

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Groups heads of equal shape, without padding.

        If there are few tokens, the heads are instead padded to the same shape, unless the kernel can read queries,
        keys and values from one joint projection.
        """
        if not context.has_fewer_than(FEW_TOKENS) or self.takes_fused_qkv(spec, context):
            return super().layout(spec, context)
        rank = max(spec.ranks, default=0)
        return padded_buckets(spec.ranks, rank, rank), (max(spec.value_dims),) * len(spec.heads)

    def takes_fused_qkv(self, spec: AttentionSpec, context: AttentionContext) -> bool:
        # The kernel multiplies projected queries and keys directly. Strengths, shared rows and norms need operations
        # between projection and kernel, but rotations and biases are arguments of the kernel.
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
        # Under autocast, projections return a lower precision than float32, which the kernel does not support. The
        # kernels also do not support a mixture together with a bias.
        if first.shape[1] < FEW_QUERIES or first.dtype != torch.float32 or has_both:
            return super().__call__(buckets, factors, values)
        return native_outputs(buckets, factors, values, self.token_sizes())


def native_outputs(
    buckets: tuple[Bucket, ...],
    factors: tuple[ScoreFactors, ...],
    values: BucketValues,
    sizes: Float[Tensor, "batch keys"] | None,
) -> HeadOutputs:
    """Computes the attention of all heads with the C++ kernel, and returns their concatenated outputs."""
    mixtures = [factor.mixture for factor in factors if factor.mixture is not None]
    if mixtures:
        return mixtures[0].native_outputs(mixtures, factors[0].scale, values, sizes)
    biases = [part.bias for part in factors if part.bias is not None]
    remaining_factors, queries, keys, tokens = iter(factors), [], [], factors[0].query.shape[1]
    for bucket, value in zip(buckets, values, strict=True):
        if bucket.rank:
            query, key = next(remaining_factors).folded()
        else:  # if queries and keys have no features, the kernel returns the mean of the values
            query, key = value.new_empty(len(value), value.shape[1], tokens, 0), value[..., :0]
        queries.append(query)
        keys.append(key)
    bias = torch.cat(biases, 1) if biases else None
    return native_attention(queries, keys, values, sizes, factors[0].scale, bias)


class Auto(Fused):
    """The default backend, which uses `Native` for float32 inference on a CPU, and otherwise `Fused`.

    If the heads of a layer mix score maps that they share, `Eager` is used instead of `Fused`.
    """

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        if Native.runs(spec, context):
            return Native()
        # `Eager` computes each shared block's map once. A fused kernel would compute it again for every head.
        return Eager() if spec.traits.mixes_blocks else Fused()


class Portable(Eager):
    """Scaled dot-product attention in few graph operations, for exported files.

    The exported graph does not depend on the batch size, the number of threads or the machine. Neighbouring heads of
    equal widths are computed in one operation. If padding adds little arithmetic, all heads are padded, and computed in
    one operation. Queries and values may have different widths. If tokens have sizes, each key is weighted by its size.
    """

    takes_few_queries = True

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        # A head of rank 0 is padded to rank 1. Its zero rows give all keys the same score, apart from token sizes.
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
    """The quantities that a token reducer gets from one attention layer.

    `attention` contains the full attention maps. `class_attention` contains only the first row of each map, which is
    the class token's attention. `keys` is the mean of the keys over the heads. `value_norms` contains the norm of each
    value vector.
    """

    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
    value_norms: Float[Tensor, "batch heads tokens"] | None = None


class AttentionCapture(Backend):
    """A backend that weights keys by token sizes, and sends attention maps or other quantities to a token reducer.

    `sizes` returns how many original tokens each token represents, or None if every size is 1. `log_sizes` returns the
    logarithms of the sizes. `receive` is called with the quantities that `wanted` names, which may be "attention",
    "class_attention", "keys" and "value_norms". A fused kernel is used unless full attention maps or gradients of the
    sizes are needed.
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
        """Returns a C++ backend if possible, and otherwise this backend.

        The C++ backend can be used if its kernel runs and if `wanted` names nothing except "class_attention".
        """
        if self.wanted == ("class_attention",) and NativeCapture.supports(spec, context):
            return NativeCapture(self.sizes, self.receive)
        return Native(self.sizes) if not self.wanted and Native.runs(spec, context) else self

    def layout(self, spec: AttentionSpec, context: AttentionContext) -> HeadLayout:
        """Puts all heads into one bucket with one width, because fused kernels require equal widths."""
        # If all heads have rank 0, they are padded to rank 1. Zero rows then give uniform maps that can be captured.
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
        # A fused kernel cannot be used for learned sizes or full maps. Learned sizes may be 0, where the logarithm is
        # -inf and has an infinite gradient (see `sized_softmax`). Fused kernels never store full maps.
        learned = sizes is not None and sizes.requires_grad and torch.is_grad_enabled()
        if learned or "attention" in self.wanted:
            attention = sized_softmax(scores(factors), sizes)
            self.pass_on(attention, factors, value)
            return attention @ value
        if self.wanted:
            first = None
            if "class_attention" in self.wanted:
                # Fused kernels return no maps, so the class token's row, [batch, heads, 1, keys], is computed here.
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
        # With a mask, the ONNX export replaces the kernel by products, whose output has a different memory layout.
        return output.contiguous() if factors.bias is not None and torch.compiler.is_exporting() else output

    def pass_on(
        self, attention: Float[Tensor, "batch heads queries tokens"] | None, factors: ScoreFactors, value: ValueBatch
    ) -> None:
        """Sends the quantities in `wanted` to `receive`. The class token's attention is row 0 of `attention`."""
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
    """A forward hook that sends uniform attention to `capture.receive`, for layers whose backend captures nothing.

    With this hook, a token reducer also gets attention from a layer without heads.
    """
    (batch, count), spec = output.shape[:2], layer.spec
    uniform = output.new_full((batch, len(spec.heads), count, count), 1 / max(count, 1))
    keys = output.new_zeros(batch, count, max((*spec.ranks, 1)))
    capture.receive(CapturedAttention(uniform, uniform[:, :, 0], keys, uniform[:, :, 0]))


class NativeCapture(Native):
    """The C++ kernel for layers that send the class token's attention to a token reducer.

    The kernel returns only outputs, so the class token's attention is computed separately in PyTorch.
    """

    def __init__(self, sizes: TokenSizes | None, receive: Callable[[CapturedAttention], None]):
        super().__init__(sizes)
        self.receive = receive

    @staticmethod
    def supports(spec: AttentionSpec, context: AttentionContext) -> bool:
        """Whether the kernel runs here, and the scores are plain dot products without rotary positions or biases."""
        plain = spec.form == "dense" and not spec.pair_bias
        return plain and Native.runs(spec, context) and Native().takes_fused_qkv(spec, context)

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        return self  # `Native` may fall back to `Fused`, which would capture nothing

    def attend_fused_qkv(self, joint: JointFeatures) -> HeadOutputs:
        features, rows, num_rows = joint.features, tuple(joint.rows), sum(joint.rows)
        query, key = features[:, :1, :num_rows], features[..., num_rows : 2 * num_rows]
        # One product computes the scores of all heads, because `rows_by_head` turns the queries into a block-diagonal
        # matrix.
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
    """Returns a float32 matrix with the entry `scale` where a direction (column) belongs to a head (row), else 0."""
    return torch.block_diag(*(torch.full((1, count), scale, dtype=torch.float32) for count in rows))


@dataclass(frozen=True)
class Observation:
    """All intermediate results of one layer, with heads in storage order.

    `query` and `key` are already normalized and rotated, but not yet multiplied by the strength. The other results are
    score = scale * (query * strength) @ key^T, attention = softmax(score), and output = attention @ value. The layer's
    output is the sum of output @ readout over all heads, plus a bias. Directions and value dimensions are padded with
    zeros.
    """

    # Heads of different ranks are padded to fit in one tensor. The zeros change neither scores nor outputs.
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
    """Computes attention like `Eager`, with all heads padded to the same sizes, and sends the results to `observe`.

    A head of rank 0 has zero scores and therefore uniform attention. If a token reducer uses the attention of this
    layer, pass the layer's `AttentionCapture` backend as `capture`. Keys are then weighted by token sizes, and the
    reducer still gets its quantities.
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
    """Returns a softmax in which every key is weighted by its token size. A key of size 0 gets no attention.

    Adding the logarithms of the sizes to the scores would give the same attention, but the gradient of log(0) is
    infinite. Here, the gradients of the sizes are finite, because the score of a removed key (size 0) is clamped to the
    largest score of the other keys. Without the clamp, as in DynamicViT (Rao et al., 2021), gradients grow
    exponentially with the scores of removed keys.
    """
    if sizes is None or not logits.shape[-1]:
        return torch.softmax(logits, dim=-1)
    weights = sizes[:, None, None, :]
    # A softmax does not depend on the subtracted constant, so the constant needs no gradient. It is the largest score
    # of the keys that are present. Without the clamp, exp of a removed key's larger score could overflow to infinity,
    # and infinity * 0 is NaN.
    largest = logits.detach().masked_fill(weights == 0, float("-inf")).amax(-1, keepdim=True)
    weighted = (logits - largest).clamp(max=0.0).exp() * weights
    return weighted / weighted.sum(-1, keepdim=True)
