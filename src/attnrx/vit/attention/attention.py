"""The attention layer, which combines query, key, value and output projections with an attention backend."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.arguments import checked, instance
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import has_fixed_weights, is_traced
from attnrx.support.registry import Registry
from attnrx.support.shapes import Float, Int, Tensor, TokenBatch
from attnrx.vit.attention.backends import (
    AttentionCapture,
    AttentionContext,
    Auto,
    Backend,
    Bucket,
    Eager,
    Fused,
    Native,
    Observed,
    ScoreFactors,
    has_equal_heads,
)
from attnrx.vit.attention.forms import Positions, RotaryForm, form_of, in_buckets, row_pairs
from attnrx.vit.attention.head_linear import (
    HeadLinear,
    OutputProjection,
    PackedWeights,
    addresses_of,
    joint_product,
    parameters_of,
)
from attnrx.vit.kernels.compilation import required_library
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.maps import HEADS
from attnrx.vit.spec import AttentionSpec, Spectrum

BACKENDS = Registry[type[Backend]]("backend", Auto, Eager, Fused, Native)
"""The backend classes by name."""
MOST_PLANS = 1024
"""The largest number of plans that a layer caches, one for every batch and image size. A full cache is cleared."""


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is computed for one input shape: the backend, the groups of heads (buckets) and the padded sizes.

    `value_dims` contains the value dimension of every head after padding, and `widths` the same for every bucket.
    `rows` contains the number of query and key rows of every head after padding. If `joint` is true,
    `Backend.attend_fused_qkv` computes the attention.
    """

    backend: Backend
    buckets: tuple[Bucket, ...]
    value_dims: tuple[int, ...]
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    joint: bool


class Attention(nn.Module):
    """Multi-head attention in which every head can have its own rank (query and key dimension) and value dimension.

    Heads are numbered in storage order. `spec.heads` contains their indices in the original model. `spec.form`
    determines how scores are computed, e.g. with rotary positions.
    """

    def __init__(self, spec: AttentionSpec, backend: Backend | None = None):
        super().__init__()
        self.spec = spec
        self.scores = form_of(spec)
        self.value = HeadLinear(spec.width, spec.value_dims, spec.has_bias("value"))
        self.output = OutputProjection(spec.value_dims, spec.width, spec.has_bias("output"))
        self.inner_norms = nn.ModuleDict({name: nn.Identity() for name in spec.inner_norms})
        self.kept_patches: Callable[[], Int[Tensor, "batch kept"] | None] | None = None
        self.backend: Backend = backend or Auto()
        self._packed: PackedWeights | None = None
        # `equal_heads` is the number of heads and their common width. It is None if widths differ, if heads are padded,
        # or if the layer needs any operation between the projections and the attention products.
        is_plain = has_equal_heads(spec) and not (spec.inner_norms or spec.pair_bias)
        self.equal_heads = (len(spec.heads), spec.ranks[0]) if is_plain and Fused.width(spec) == spec.ranks[0] else None
        self._plans_of: Backend | None = None
        self._plans: dict[AttentionContext, LayerPlan] = {}

    def forward(
        self,
        tokens: TokenBatch,
        key_tokens: Float[Tensor, "batch keys width"] | None = None,
        positions: Positions | None = None,
    ) -> TokenBatch:
        """Returns the attention output of `tokens`.

        Keys and values are computed from `key_tokens`, or from `tokens` if `key_tokens` is None. If you pass
        `key_tokens`, its first tokens must be `tokens`. `positions` contains rotations and biases for all tokens of an
        image. If patches were pruned, `kept_patches` returns the indices of the remaining patches, and the layer uses
        only their positions.

        Raises:
            InvalidInput: The layer needs a bias for every pair of tokens, but `positions` contains none.
        """
        if not self.spec.attends:
            return self.output(tokens[..., :0])  # without heads, the layer adds only its output bias
        if self._is_short and positions is None:
            return self._traced(tokens, tokens if key_tokens is None else key_tokens)
        source = tokens if key_tokens is None else key_tokens
        # The plan depends on the number of keys, because `key_tokens` holds all tokens even if there are few queries.
        plan, scores = self.plan(source), self.scores
        kept = None if self.kept_patches is None else self.kept_patches()
        if positions is not None:
            # The model's library computes positions for all patches of an image, including pruned patches.
            positions = positions.of_patches(kept)
        sides = ((scores.query, plan.rows), (scores.key, plan.rows), (self.value, plan.value_dims))
        shared = sides if key_tokens is None else sides[1:]
        joint = joint_product(source, shared, self._packed)
        # Under autocast, the joint product has a lower precision than the tokens, so `joint.dtype` is checked.
        if plan.joint and key_tokens is None and joint is not None and joint.dtype == tokens.dtype:
            rotation = scores.rotation_table(positions) if isinstance(scores, RotaryForm) else None
            bias = self._bias(positions, tokens.shape[1])
            features = JointFeatures(joint, plan.rows, plan.value_dims, self.spec.scale, rotation, bias)
            return self._projected(plan.backend.attend_fused_qkv(features), plan.value_dims)
        parts = () if joint is None else joint.split_with_sizes([sum(rows) for _, rows in shared], -1)
        query = parts[0] if len(parts) == 3 else scores.query.padded(tokens, plan.rows, scores.query_factor)
        key, value = parts[-2:] or [side.padded(source, rows) for side, rows in sides[1:]]
        # Each bucket's values have the shape [batch, heads, keys, width].
        values = [part.transpose(1, 2) for part in in_buckets(value, plan.widths, plan.buckets)]
        factors = self._score_factors(query, key, plan.rows, plan.buckets, positions, kept)
        return self._projected(plan.backend(plan.buckets, factors, values), plan.value_dims)

    @property
    def _is_short(self) -> bool:
        """Whether a compiler is recording this call and all heads compute plain dot products of equal widths."""
        if self.equal_heads is None or not is_traced() or has_fixed_weights():
            return False
        return type(self.backend) in (Auto, Fused, AttentionCapture)

    def takes_few_queries(self, tokens: TokenBatch) -> bool:
        """Whether `forward` may get fewer query tokens than key tokens."""
        # Heads of rank 0 bypass the backend's attention, so a layer with such heads needs all queries.
        return self._is_short or (all(self.spec.ranks or (0,)) and self.plan(tokens).backend.takes_few_queries)

    def _traced(self, tokens: TokenBatch, key_tokens: TokenBatch) -> TokenBatch:
        """Computes the output of `forward` for heads of equal widths, while a compiler records a graph.

        `torch.compile` adds a guard for every number that the code reads, and checks all guards in every call. This
        method reads only two numbers. `forward` would also read the sizes of every head.
        """
        assert self.equal_heads is not None
        (heads, width), backend = self.equal_heads, self.backend
        sides = (self.scores.query(tokens), self.scores.key(key_tokens), self.value(key_tokens))
        query, key, value = [side.unflatten(2, (heads, width)) for side in sides]
        factors = ScoreFactors(Bucket(0, heads, width, width), query, key, None, self.spec.scale)
        return self.output(backend.attend(factors, value.transpose(1, 2)).transpose(1, 2).flatten(2))

    def pack_(self) -> None:
        """Moves the query, key and value weights into one joint weight (see `PackedWeights`)."""
        self._packed = PackedWeights.of_(self._projections)

    def packed(self, parameters: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None] | None:
        """Returns the joint weight and bias of several projections, or None if they have no joint weight.

        `parameters` lists the weights and biases of these projections (of any shape).
        """
        return None if self._packed is None else self._packed.last(parameters)

    @property
    def _projections(self) -> tuple[HeadLinear, HeadLinear, HeadLinear]:
        return self.scores.query, self.scores.key, self.value

    def _apply(self, *args: Any, **kwargs: Any) -> "Attention":
        before = addresses_of(parameters_of(self._projections))
        super()._apply(*args, **kwargs)
        # Weights that kept their addresses are not packed, because another module may share them.
        if addresses_of(parameters_of(self._projections)) != before:
            self.pack_()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.pack_()

    def _refuse_quantization(self, qconfig: object) -> None:
        raise NotSupported(
            "torch.ao.quantization replaces nn.Linear only, and leaves the linear maps of attention and MLPs here as "
            "they are. Export a quantized file: attnrx.export(model, path, to='int8', calibration=images), or "
            "to='openvino(precision=int8)'."
        )

    # torch.ao.quantization (e.g. quantize_dynamic) sets `qconfig` on every module before it replaces modules.
    qconfig = property(fset=_refuse_quantization)

    def _projected(self, features: Tensor, value_dims: tuple[int, ...]) -> TokenBatch:
        if "output_norm" in self.inner_norms:
            # The norm must not see the padding, because zeros would change its mean and variance.
            head_dim, (width,) = self.spec.head_dim, set(value_dims)
            if width != head_dim:
                features = features.unflatten(-1, (len(value_dims), width))[..., :head_dim].flatten(2)
            return self.output(self.inner_norms["output_norm"](features))
        # Without a norm, the features stay padded. Zero columns in the weight cancel the padding at no cost.
        return self.output.padded(features, value_dims)

    def _bias(self, positions: Positions | None, queries: int) -> Tensor | None:
        """Returns the bias that is added to the scores of the first `queries` tokens in the stored heads, or None."""
        bias, heads = None if positions is None else positions.bias, self.spec.heads
        if bias is None:
            if not self.spec.pair_bias:
                return None
            raise InvalidInput("a layer with a bias per pair of tokens was called without it.")
        # Indexing copies the bias, so heads and queries are only selected if some of them are not needed.
        if heads != tuple(range(bias.shape[1])):
            bias = torch.cat([bias[:, head : head + 1] for head in heads], 1)
        return bias if queries == bias.shape[2] else bias[:, :, :queries]

    def _score_factors(
        self,
        query: Tensor,
        key: Tensor,
        rows: tuple[int, ...],
        buckets: tuple[Bucket, ...],
        positions: Positions | None,
        kept: Int[Tensor, "batch kept"] | None,
    ) -> tuple[ScoreFactors, ...]:
        """Applies norms and rotary positions to queries and keys, and returns the score factors of every bucket."""
        sides = [self._normed(side, name, rows) for side, name in ((query, "query_norm"), (key, "key_norm"))]
        # The last layer may compute only the class token. Its queries then need only the first positions.
        of_queries = positions
        if positions is not None and query.shape[1] < key.shape[1]:
            of_queries = positions.of_first(query.shape[1])
        # As in timm, norms come before rotations. A norm has a weight per direction, and a rotation mixes directions.
        query = self.scores.at_positions(sides[0], rows, of_queries)
        key = self.scores.at_positions(sides[1], rows, positions)
        factors = self.scores.at_places(self.scores(query, key, buckets), kept)
        bias = self._bias(positions, query.shape[1])
        if bias is None:
            return factors
        bias = bias.to(query.dtype)
        return tuple(replace(part, bias=bias[:, part.bucket.heads]) for part in factors)

    def _normed(self, features: Tensor, name: str, rows: tuple[int, ...]) -> Tensor:
        if name not in self.inner_norms:
            return features
        # No direction was removed from this layer (spec.fixes_scores), and all heads are padded to one width. The norm
        # must not include the padding.
        rank, (width,) = self.spec.original_rank, set(rows)
        parts = features.unflatten(-1, (len(rows), width))  # batch, tokens, heads, width
        normed = self.inner_norms[name](parts[..., :rank])
        return F.pad(normed, (0, width - rank)).flatten(2)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles, without the cached plans and the packed weights."""
        return {**self.__dict__, "_plans": {}, "_plans_of": None, "_packed": None}

    def plan(self, tokens: TokenBatch) -> LayerPlan:
        """Returns the plan for tokens of shape [batch, tokens, width]. Plans are cached by shape."""
        context = AttentionContext.of(tokens)
        if not context.free:  # sizes may be symbolic, and a compiler would trace the cache
            return self._planned(context)
        # Users may replace the `backend` attribute, so the cached plans are dropped if their backend is another one.
        if self._plans_of is not self.backend or len(self._plans) > MOST_PLANS:
            self._plans_of, self._plans = self.backend, {}
        if context not in self._plans:
            self._plans[context] = self._planned(context)
        return self._plans[context]

    def _planned(self, context: AttentionContext) -> LayerPlan:
        backend = self.backend.at(self.spec, context)
        buckets, value_dims = backend.layout(self.spec, context)
        widths = tuple([value_dims[bucket.start] for bucket in buckets])
        joint = backend.takes_fused_qkv(self.spec, context)
        return LayerPlan(backend, buckets, value_dims, self.scores.rows(buckets), widths, joint)

    def spectrum(self) -> Spectrum:
        """Returns the score directions of all heads in float64. In `query` and `key`, the last column is the bias."""
        spec = self.spec
        ranks, width = spec.ranks, max((*spec.ranks, 1))
        used = torch.arange(width) < torch.tensor(ranks)[:, None] if ranks else torch.zeros(0, width, dtype=torch.bool)
        strength = torch.zeros(len(ranks), width, dtype=torch.float64)
        # Assigning to a boolean mask fills it row by row, so strengths are assigned head by head, as they are stored.
        strength[used] = self.scores.strengths().detach().cpu().double().flatten()
        shared, pairs = spec.traits.shares_directions, row_pairs(spec) if spec.traits.rotates else None
        # Directions that heads share are returned as one table, even if they are divided into blocks.
        rows = (sum(spec.rows),) if shared else spec.rows
        owners = rows if shared else ranks
        tables = [_table(side, rows, owners, width) for side in (self.scores.query, self.scores.key)]
        # A norm over all directions of a map depends on every direction, so no direction can be removed.
        fixed = (*(("qk",) if spec.fixes_scores else ()), *(("vo", HEADS) if spec.fixes_values else ()))
        return Spectrum(
            tables[0], tables[1], strength, used, spec.scale, spec.norms, spec.heads,
            shared=shared, pairs=pairs, fixed=fixed,
        )  # fmt: skip

    def value_factors(self) -> dict[str, Tensor]:
        """Returns small float64 matrices from which the SVD of every head's value map W_O W_V can be computed.

        `value_factor` and `readout_factor` have the shape [heads, _, v_head_dim], and are the R factors of QR
        decompositions. For `value_factor`, each head's transposed rows of the value projection are decomposed. For
        `readout_factor`, each head's columns of the output projection are decomposed. These rows and columns are first
        padded with zeros. `value_bias` has the shape [heads, v_head_dim].
        """
        value_dims, width = self.spec.value_dims, max((*self.spec.value_dims, 1))
        rows = _table(self.value, value_dims, value_dims, width)
        columns = torch.zeros(len(value_dims), width, self.spec.width, dtype=torch.float64)
        weights = self.output.weight.detach().cpu().double().split(value_dims, dim=1)
        for padded, weight in zip(columns, weights, strict=True):
            padded[: weight.shape[1]] = weight.mT
        # Orthonormal factors do not change singular values. The SVD of W_O W_V therefore only needs the two small R.
        factors = [torch.linalg.qr(side.mT, mode="r").R for side in (rows[..., :-1], columns)]
        return {"value_factor": factors[0], "readout_factor": factors[1], "value_bias": rows[..., -1].clone()}


def _table(side: HeadLinear, rows: tuple[int, ...], ranks: tuple[int, ...], width: int) -> Tensor:
    augmented = side.augmented()
    table = augmented.new_zeros(len(rows), width, augmented.shape[1])
    for head, (part, rank) in enumerate(zip(augmented.split(rows), ranks, strict=True)):
        table[head, :rank] = part[:rank]
    return table


@contextmanager
def using(layers: Iterable[Attention], backends: Iterable[Backend]) -> Iterator[None]:
    """Replaces the backends of the layers within the context, and restores the previous backends afterwards."""
    # `layers` is iterated twice, and an iterator would be exhausted when the backends are restored.
    layers = tuple(layers)
    # Cached plans are restored, too. They refer to the temporary backend and would keep what it observed in memory.
    before = [(layer.backend, layer._plans_of, layer._plans) for layer in layers]
    try:
        for layer, backend in zip(layers, backends, strict=True):
            layer.backend = backend
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            layer.backend, layer._plans_of, layer._plans = state


def backend_of(name: str) -> Backend:
    """Creates a backend of the class that has this name in `BACKENDS`.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The backend's kernel cannot be built on this machine.
    """
    kind = BACKENDS[name]
    if kind is Native:
        # Without its kernel, `Native` falls back to `Fused`. A backend requested by name must not change silently.
        required_library()
    return kind()


@checked(backend=instance("the name of a backend, e.g. 'auto', or a Backend", str, Backend))
def use_backend(model: nn.Module, backend: str | Backend) -> nn.Module:
    """Sets the backend of every attention layer in place, and returns the model.

    Backends are "auto", "eager" (the reference), "fused" (PyTorch's fused kernels) and "native" (C++). New models use
    "auto", which chooses "native" for float32 inference on a CPU. Otherwise it chooses the backend that is usually
    fastest. Layers that send their attention to a token reducer or an observer keep their backend. Saved models do not
    store the backend, because the fastest backend depends on the machine.

    Args:
        model: A model with attnrx attention layers. It is changed in place.
        backend: The name of a backend, or a `Backend`.

    Returns:
        The same model.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The C++ kernel could not be built, the model has no attnrx attention, or all layers send their
            attention to a token reducer.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.use_backend(rx.accelerate(rx.load(vit)), "eager")  # the reference
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    free = [layer for layer in layers if not isinstance(layer.backend, AttentionCapture | Observed)]
    if not free:
        cause = "every layer's attention is captured for a token reducer" if layers else "it has no attention of attnrx"
        raise NotSupported(f"no layer of this {type(model).__name__} can take another backend: {cause}.")
    new_backend = backend_of(backend) if isinstance(backend, str) else backend
    for layer in free:
        layer.backend = new_backend
    return model
