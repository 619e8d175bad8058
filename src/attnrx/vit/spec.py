"""Data classes that describe the structure (`AttentionSpec`) and the directions (`Spectrum`) of attention layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.registry import Registry
from attnrx.support.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class FormTraits:
    """The properties of an attention form (a way to compute scores) on which costs, rules and backends depend.

    Register the traits together with the class that computes the scores (`attention.forms.register_form`).

    Attributes:
        has_strengths: Whether every direction (a rank-one term of the scores) has a learned factor, its strength, in
            every head that uses the direction.
        shares_directions: Whether all heads share one set of directions.
        norms: The supported normalizations of query and key rows, starting with the default.
        rotates: Whether pairs of rows are rotated by angles that depend on the token's position.
        mixes_blocks: Whether shared directions form blocks, and a matrix mixes the score maps of the blocks.
        has_distances: Whether queries are also multiplied by position vectors. There is one vector for every distance
            in rows, and one for every distance in columns, to the keys in a window.
    """

    has_strengths: bool
    shares_directions: bool
    norms: tuple[str, ...]
    rotates: bool = False
    mixes_blocks: bool = False
    has_distances: bool = False


# Other packages can add attention forms with `attention.forms.register_form`.
FORMS = Registry[FormTraits](
    "form of attention",
    named={
        "dense": FormTraits(has_strengths=False, shares_directions=False, norms=("none",)),
        "rotary": FormTraits(has_strengths=False, shares_directions=False, norms=("none",), rotates=True),
        "axial": FormTraits(has_strengths=False, shares_directions=False, norms=("none",), has_distances=True),
    },
)
NORMS = ("kept", "none", "original")
BIASES = ("query", "key", "value", "output")
INNER_NORMS = ("query_norm", "key_norm", "output_norm")


@dataclass(frozen=True)
class Compression:
    """A way to delete the parts that a prescription removes, selected by its name with `realize(by=NAME)`.

    Some layers divide query and key rows by their norms over all directions. If `keeps_norms` is true, such a layer
    keeps all rows that these norms need, and the compressed model has the same outputs as the masked model. If
    `keeps_norms` is false, the layer divides by the norms over the kept directions. If `fit` is not None, it is called
    with the model, the prescription and images. It returns the pruned layers, with strengths fitted to the images.
    """

    keeps_norms: bool = True
    fit: Callable[..., Sequence[Any]] | None = None


# `attention.forms.register_form` adds the compressions that are specific to a form.
COMPRESSIONS = Registry[Compression]("compression", named={"compress": Compression()})


def compression_of(by: str) -> Compression | None:
    """Returns the compression registered under the name `by`, or None for "mask", which deletes no weights.

    Raises:
        UnknownName: No installed package has registered a compression with this name.
    """
    return None if by == "mask" else COMPRESSIONS[by]


@dataclass(frozen=True)
class AttentionSpec:
    """The structure of an attention layer: its form, and every head's number of directions and value dimension.

    Attributes:
        form: The name of the attention form, e.g. "dense".
        width: The number of features per token.
        head_dim: The value dimension of a head in the original model.
        ranks: The number of score directions (rank-one terms of the scores) per stored head.
        heads: The index of each stored head in the original model.
        scale: The factor by which scores are multiplied. It stays the same if directions are removed.
        original_rank: The number of score directions per head in the original model. If heads share directions, this
            is the number for all heads together.
        norms: The normalization of query and key rows: "none", "kept" (by the norm over the kept directions) or
            "original" (by the norm over all original directions, so the projections still compute all of them).
        value_ranks: The value dimension per stored head, or None if all are `head_dim`.
        biases: The names of the projections that have a bias.
        blocks: The number of neighbouring shared directions in every block, for forms that mix blocks. A block may be
            empty.
        pairs: For the rotary form, the frequencies of each head's rotated pairs, as indices into the original head's
            frequencies. The default is all frequencies. A head stores its unrotated rows first, then the real parts of
            all pairs, and then the imaginary parts.
        pair_bias: Whether a bias per pair of tokens is added to the scores.
        inner_norms: The library's norms that the layer applies to the queries and keys of every head, or to the
            concatenated outputs of the heads before the output projection.
        window: The number of token rows and the number of token columns in a window, for the axial form.
    """

    form: str
    width: int
    head_dim: int
    ranks: tuple[int, ...]
    heads: tuple[int, ...]
    scale: float
    original_rank: int
    norms: str = "none"
    value_ranks: tuple[int, ...] | None = None
    biases: tuple[str, ...] = BIASES
    blocks: tuple[int, ...] | None = None
    pairs: tuple[tuple[int, ...], ...] | None = None
    pair_bias: bool = False
    inner_norms: tuple[str, ...] = ()
    window: tuple[int, int] | None = None

    def __post_init__(self):
        # Some defaults depend on other fields. object.__setattr__ is needed because the class is frozen.
        if self.traits.rotates and self.pairs is None:  # `traits` raises an error for unknown forms
            object.__setattr__(self, "pairs", (tuple(range(self.original_rank // 2)),) * len(self.heads))
        if self.value_ranks is not None and all(rank == self.head_dim for rank in self.value_ranks):
            object.__setattr__(self, "value_ranks", None)  # so that specs of equal layers compare as equal
        if self.norms not in self.traits.norms:
            raise InvalidInput(
                f"form={self.form!r} with norms={self.norms!r}: this form has {' or '.join(self.traits.norms)}."
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidInput(f"scale {self.scale} must be positive and finite.")
        if self.width < 1 or self.head_dim < 1 or self.original_rank < 1:
            raise InvalidInput(
                f"width {self.width}, head_dim {self.head_dim}, rank {self.original_rank} must be positive."
            )
        if any(bias not in BIASES for bias in self.biases):
            raise InvalidInput(f"biases={self.biases}: choose from {BIASES}.")
        self._check_heads()
        self._check_pairs()
        self._check_extensions()

    def _check_heads(self) -> None:
        if not len(self.ranks) == len(self.heads) == len(self.value_dims) == len(set(self.heads)):
            raise InvalidInput(
                f"{len(self.ranks)} ranks and {len(self.value_dims)} value ranks for the heads {self.heads}: give one "
                "of each for each distinct head."
            )
        if any(head < 0 for head in self.heads):
            raise InvalidInput(f"heads {self.heads} are numbers of heads of the original model, from 0.")
        if any(not 0 <= rank <= self.original_rank for rank in self.ranks):
            raise InvalidInput(f"ranks {self.ranks} must lie in 0..{self.original_rank}.")
        if any(not 0 <= rank <= self.head_dim for rank in self.value_dims):
            raise InvalidInput(f"value ranks {self.value_dims} must lie in 0..{self.head_dim}.")
        # All heads use the same projections. A head that does not need a shared direction has strength zero there.
        if self.traits.shares_directions and len(set(self.ranks)) > 1:
            raise InvalidInput(f"ranks {self.ranks}: heads that share their directions have the same rank.")
        if self.traits.mixes_blocks != (self.blocks is not None):
            raise InvalidInput(f"form={self.form!r} with blocks={self.blocks}: only forms that mix blocks have them.")
        shared = max(self.ranks, default=0)
        if self.blocks is not None and not (min(self.blocks, default=-1) >= 0 and sum(self.blocks) == shared > 0):
            raise InvalidInput(
                f"blocks {self.blocks} must divide the directions of the heads among them, one or more; ranks "
                f"{self.ranks} given."
            )

    def _check_pairs(self) -> None:
        if self.traits.rotates != (self.pairs is not None):
            raise InvalidInput(f"form={self.form!r} with pairs={self.pairs}: the rotary form alone has pairs.")
        if self.pairs is None:
            return
        if len(self.pairs) != len(self.heads):
            raise InvalidInput(f"pairs of {len(self.pairs)} heads for {len(self.heads)} heads: give one tuple each.")
        frequencies = range(self.original_rank // 2)
        for rank, pairs in zip(self.ranks, self.pairs, strict=True):
            # Each pair consists of two rows, the real part and the imaginary part.
            if 2 * len(pairs) > rank or len(set(pairs)) < len(pairs) or any(pair not in frequencies for pair in pairs):
                raise InvalidInput(f"pairs {pairs} are no distinct pairs of a head with rank {rank}.")

    def _check_extensions(self) -> None:
        # A head of rank 0 returns a mean of the values. It computes no scores to which a bias could be added.
        if self.pair_bias and not all(self.ranks):
            raise InvalidInput("a head with a bias per pair of tokens keeps one direction or more: it is not uniform.")
        if self.traits.has_distances != (self.window is not None):
            raise InvalidInput(f"form={self.form!r} with window={self.window}: only the axial form has a window.")
        if any(name not in INNER_NORMS for name in self.inner_norms):
            raise InvalidInput(f"inner_norms={self.inner_norms}: choose from {INNER_NORMS}.")
        if self.fixes_scores and any(rank != self.original_rank for rank in self.ranks):
            raise InvalidInput(f"ranks {self.ranks}: norms of query and key need all {self.original_rank} directions.")
        if self.fixes_values and (self.value_ranks is not None or self.heads != tuple(range(len(self.heads)))):
            raise InvalidInput(
                f"heads {self.heads} with value ranks {self.value_ranks}: a norm over the outputs of all heads needs "
                "every head in its place and all its value dimensions, and heads are stored by their ranks. Give the "
                "heads of a layer one rank, e.g. qk=uniform_rank:0.5 in place of total_rank, or realize a mask."
            )

    @cached_property
    def traits(self) -> FormTraits:
        """The traits of the layer's form, cached because every forward pass reads them."""
        return FORMS[self.form]

    @property
    def has_norms(self) -> bool:
        """Whether query and key rows are divided by their norms."""
        return self.norms != "none"

    @property
    def num_distances(self) -> int:
        """The number of row distances plus the number of column distances in a window, or 0 without a window."""
        return 0 if self.window is None else 2 * sum(self.window) - 2

    @property
    def fixes_scores(self) -> bool:
        """Whether directions cannot be removed because the library normalizes query or key over all directions."""
        return "query_norm" in self.inner_norms or "key_norm" in self.inner_norms

    @property
    def fixes_values(self) -> bool:
        """Whether heads and value dimensions cannot be removed because one norm covers the outputs of all heads."""
        return "output_norm" in self.inner_norms

    @property
    def is_plain(self) -> bool:
        """Whether scores are plain dot products, without positions, biases or norms."""
        return self.form == "dense" and not self.pair_bias and not self.fixes_scores

    @property
    def keeps_original_norms(self) -> bool:
        """Whether query and key rows are divided by their norms over all original directions."""
        return self.norms == "original"

    @property
    def attends(self) -> bool:
        """Whether the layer has any heads, so that tokens attend to each other."""
        return bool(self.heads)

    @property
    def value_dims(self) -> tuple[int, ...]:
        """The value dimension of each stored head."""
        return (self.head_dim,) * len(self.heads) if self.value_ranks is None else self.value_ranks

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows that the query projection (and the key projection) stores for each head.

        The number is the rank of the head, or the original rank if the layer needs the original norms. If heads share
        directions, there is one number for all heads, or one per block.
        """
        if self.blocks is not None:
            return self.blocks
        if self.traits.shares_directions:
            return self.ranks[:1]
        if self.keeps_original_norms:
            # A head of rank 0 attends uniformly, so it needs no norms and no rows.
            return tuple(self.original_rank if rank else 0 for rank in self.ranks)
        return self.ranks

    def has_bias(self, projection: str) -> bool:
        """Whether the projection with this name ("query", "key", "value" or "output") has a bias."""
        return projection in self.biases

    def with_shared_directions(self, rank: int, blocks: tuple[int, ...] | None = None) -> "AttentionSpec":
        """Returns a spec in which all heads share `rank` directions, divided into `blocks` if these are not None.

        The new `original_rank` counts the directions of all heads together. `blocks` is ignored if `rank` is 0.

        Raises:
            NotSupported: No installed package has registered a form that shares directions, or the layer has relative
                positions per axis.
        """
        if self.traits.has_distances:
            raise NotSupported("heads with relative positions decomposed by axis cannot share their directions.")
        # If the layer already shares directions, `original_rank` already counts all heads together.
        blocks, whole = blocks if rank and self.heads else None, self.original_rank
        form = _sharing_form(mixes_blocks=blocks is not None)
        return replace(
            self, form=form, ranks=(rank,) * len(self.heads), norms="none", blocks=blocks,
            original_rank=whole if self.traits.shares_directions else whole * len(self.heads),
        )  # fmt: skip

    def with_ranks(
        self, ranks: Sequence[int], heads: Sequence[int], norms: str, pairs: Sequence[tuple[int, ...]] | None = None
    ) -> "AttentionSpec":
        """Returns a spec with other ranks, heads and norms. The scale and each head's value dimension stay the same.

        Args:
            ranks: The new rank of each head in `heads`.
            heads: The original indices of the heads to keep, in their new order.
            norms: The new normalization of query and key rows.
            pairs: The pairs that each head keeps in the rotary form. By default, a head keeps as many of its first
                pairs as its rank allows.
        """
        # Heads are identified by their indices in the original model, because compression changes their order.
        value_dim_of = dict(zip(self.heads, self.value_dims, strict=True))
        value_ranks = tuple(value_dim_of[head] for head in heads)
        if self.pairs is not None and pairs is None:
            pairs_of_heads = dict(zip(self.heads, self.pairs, strict=True))
            pairs = [pairs_of_heads[head][: rank // 2] for head, rank in zip(heads, ranks, strict=True)]
        return replace(
            self, ranks=tuple(ranks), heads=tuple(heads), norms=norms, value_ranks=value_ranks,
            pairs=None if pairs is None else tuple(pairs),
        )  # fmt: skip


def _sharing_form(*, mixes_blocks: bool) -> str:
    """Returns the name of the first registered form that shares directions and has this value of `mixes_blocks`."""
    for form, traits in FORMS.items():
        if traits.shares_directions and traits.mixes_blocks == mixes_blocks:
            return form
    raise NotSupported("no installed package computes attention whose heads share their directions.")


@dataclass(frozen=True, repr=False)
class Spectrum(Displayed):
    """The directions (rank-one terms) and strengths of one map in a layer, from which pruning rules choose.

    For attention scores, `score[h, i, j] = scale * sum_r strength[h, r] (query[h, r] . x_i) (key[h, r] . x_j)`, where x
    is a token with a 1 appended. Rules get the layer's other maps, e.g. from tokens to values, in the same format.

    Attributes:
        query: The query rows, with the bias as last column. The `owners` axis has one entry per head, or a single entry
            if all heads share their directions. Heads with fewer rows than the largest rank are padded.
        key: The key rows, in the same format.
        strength: The strength of every direction in every head.
        used: False for padding, and True for all other directions.
        scale: The factor by which scores are multiplied.
        norms: How scores are normalized: not at all ("none"), by the norms of query and key over the kept directions
            ("kept"), or by these norms over all original directions ("original").
        heads: The index of each head in the original model.
        map: The name of the map, e.g. "qk".
        shared: Whether all heads share their directions.
        pairs: In rotary attention, the frequency that rotates each row, or -1 for unrotated rows.
        fixed: The layer's maps (see `LAYER_MAPS`) from which nothing can be removed, because a norm runs over all their
            features.
    """

    query: Float[Tensor, "owners directions augmented"]
    key: Float[Tensor, "owners directions augmented"]
    strength: Float[Tensor, "heads directions"]
    used: Bool[Tensor, "heads directions"]
    scale: float
    norms: str
    heads: tuple[int, ...]
    map: str = "qk"
    shared: bool = False
    pairs: Int[Tensor, "heads directions"] | None = None
    fixed: tuple[str, ...] = ()

    def __post_init__(self):
        if self.strength.ndim != 2 or self.query.ndim != 3 or self.key.ndim != 3:
            raise InvalidInput("strength is [heads, directions], and query and key are [owners, directions, features].")
        heads, directions = self.strength.shape
        if self.used.shape != self.strength.shape or len(self.heads) != heads:
            raise InvalidInput(
                f"strength {tuple(self.strength.shape)}, used {tuple(self.used.shape)}, heads {self.heads} disagree."
            )
        # If heads share directions, there is one table of rows for all heads, but strengths still differ by head.
        for table in (self.query, self.key):
            if table.shape[:2] != (1 if self.shared else heads, directions):
                whose = "shared directions" if self.shared else "directions of their own"
                raise InvalidInput(
                    f"a table of shape {tuple(table.shape)} does not fit {heads} heads with {directions} {whose}."
                )

    @property
    def has_norms(self) -> bool:
        """Whether scores are divided by the norms of query and key rows."""
        return self.norms != "none"

    @property
    def has_own_order(self) -> bool:
        """Whether directions must be ranked in their present basis, by their strengths.

        Rules must not choose another basis (e.g. by an SVD) if that would change norms or shared directions.
        """
        return self.has_norms or self.shared

    @property
    def rank(self) -> Float[Tensor, "heads"]:
        """The number of directions per head, without padding, as floating-point numbers that can be averaged."""
        return self.used.sum(-1).to(self.strength.dtype)
