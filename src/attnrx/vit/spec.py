"""The static shape of an attention layer, as plain data to build, cost and reload it, and its spectrum."""

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
    """The properties of a form of attention that costs, rules, backends and realizations depend on.

    `has_strengths`: every direction has a learned strength in every head that uses it. `shares_directions`: all heads
    share one set of directions. `norms` are the ways to normalize query and key rows, the default first. `rotates`:
    pairs of rows are rotated by angles that depend on the token's position. `mixes_blocks`: the shared directions are
    in blocks, and a matrix mixes the blocks' score maps. `has_distances`: in a window, every query is also multiplied
    with vectors for its row and column distances to the keys. `attention.forms.register_form` registers the traits
    together with the class that computes the scores.
    """

    has_strengths: bool
    shares_directions: bool
    norms: tuple[str, ...]
    rotates: bool = False
    mixes_blocks: bool = False
    has_distances: bool = False


# Other packages can add forms (`attention.forms.register_form`).
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
    """A way to delete the parts that a prescription removes (`realize(by=NAME)`).

    With `keeps_norms`, a layer that divides rows by their norms keeps the rows that only the norms need, and so it
    equals the mask. Without it, the layer divides by the norms over the kept directions. `fit` is called with the
    model, the prescription and images. It returns the prescribed layers with strengths that are fitted to the images.
    """

    keeps_norms: bool = True
    fit: Callable[..., Sequence[Any]] | None = None


# A form of attention is registered together with its own ways to compress.
COMPRESSIONS = Registry[Compression]("compression", named={"compress": Compression()})


def compression_of(by: str) -> Compression | None:
    """Returns the compression called `by`, or None for a mask, which deletes nothing.

    Raises:
        UnknownName: No installed package has registered such a compression.
    """
    return None if by == "mask" else COMPRESSIONS[by]


@dataclass(frozen=True)
class AttentionSpec:
    """The number of directions and value dimensions of every head in a layer.

    `ranks` are the numbers of score directions per stored head. `heads` are the indices of these heads in the original
    model. `norms` is the normalization of the query and key rows: "none", "kept" (the norm over the kept directions) or
    "original" (the norm over all `original_rank` directions, which the projections then still compute). In a form that
    mixes blocks, block b contains `blocks[b]` neighbouring shared directions. A block may be empty. `value_ranks` are
    the value dimensions per stored head (default: head_dim). `biases` are the projections that have a bias. `scale` is
    stored because it does not depend on the rank.

    In the rotary form, the last 2 len(pairs[h]) rows of a head are the real parts of the rotated pairs, followed by the
    imaginary parts. `pairs[h]` are their indices among the frequencies of the original head (default: all). The rows
    before them are ordinary directions. With `pair_bias`, a bias per pair of tokens is added to the scores.
    `inner_norms` are modules of the original library. The layer applies them to every head's query and key, and to the
    concatenated outputs of the heads before the output projection. In the axial form, `window` is the number of rows
    and columns of tokens for which the layer has distances.
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
        # Set the defaults that depend on other fields. The class is frozen.
        if self.traits.rotates and self.pairs is None:  # `traits` raises an error for unknown forms
            object.__setattr__(self, "pairs", (tuple(range(self.original_rank // 2)),) * len(self.heads))
        if self.value_ranks is not None and all(rank == self.head_dim for rank in self.value_ranks):
            object.__setattr__(self, "value_ranks", None)  # one form for equal layers, so they compare as equal
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
        # If a head does not use a shared direction, its strength there is zero. The projection serves all heads.
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
            # A pair is two rows, its real and its imaginary part.
            if 2 * len(pairs) > rank or len(set(pairs)) < len(pairs) or any(pair not in frequencies for pair in pairs):
                raise InvalidInput(f"pairs {pairs} are no distinct pairs of a head with rank {rank}.")

    def _check_extensions(self) -> None:
        # A head of rank 0 returns a mean of the values, so it has no softmax to which a bias could be added.
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
        """The traits of the form, looked up only once because forward passes use them."""
        return FORMS[self.form]

    @property
    def has_norms(self) -> bool:
        """Whether the rows of query and key are normalized."""
        return self.norms != "none"

    @property
    def num_distances(self) -> int:
        """The number of possible row and column distances between two tokens in the window."""
        return 0 if self.window is None else 2 * sum(self.window) - 2

    @property
    def fixes_scores(self) -> bool:
        """Whether directions cannot be removed because query or key is normalized over all of them."""
        return "query_norm" in self.inner_norms or "key_norm" in self.inner_norms

    @property
    def fixes_values(self) -> bool:
        """Whether heads and value dimensions cannot be removed because one norm covers the outputs of all heads."""
        return "output_norm" in self.inner_norms

    @property
    def is_plain(self) -> bool:
        """Whether scores are dot products of the projected rows and nothing else."""
        return self.form == "dense" and not self.pair_bias and not self.fixes_scores

    @property
    def keeps_original_norms(self) -> bool:
        """Whether rows are divided by the norms over all original directions."""
        return self.norms == "original"

    @property
    def attends(self) -> bool:
        """Whether any token attends to another one."""
        return bool(self.heads)

    @property
    def value_dims(self) -> tuple[int, ...]:
        """The value dimensions of each stored head."""
        return (self.head_dim,) * len(self.heads) if self.value_ranks is None else self.value_ranks

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows of the query projection, for every owner of directions.

        Without shared directions, it is the rank of every head, or all rows if the original norms are needed. Shared
        directions have one owner. If they are in blocks, there is one number per block.
        """
        if self.blocks is not None:
            return self.blocks
        if self.traits.shares_directions:
            return self.ranks[:1]
        if self.keeps_original_norms:
            # A head without directions attends uniformly, and needs no norms.
            return tuple(self.original_rank if rank else 0 for rank in self.ranks)
        return self.ranks

    def has_bias(self, projection: str) -> bool:
        """Whether the projection "query", "key", "value" or "output" has a bias."""
        return projection in self.biases

    def with_shared_directions(self, rank: int, blocks: tuple[int, ...] | None = None) -> "AttentionSpec":
        """Returns the layer with heads that share `rank` directions, in a form that shares directions.

        With `blocks`, the form also mixes blocks. The new original rank counts the directions of all heads together. A
        layer without any direction has no blocks.

        Raises:
            NotSupported: No installed package has registered such a form.
        """
        if self.traits.has_distances:
            raise NotSupported("heads with relative positions decomposed by axis cannot share their directions.")
        # If the layer already shares directions, its original rank counts all heads together.
        blocks, whole = blocks if rank and self.heads else None, self.original_rank
        form = _sharing_form(mixes_blocks=blocks is not None)
        return replace(
            self, form=form, ranks=(rank,) * len(self.heads), norms="none", blocks=blocks,
            original_rank=whole if self.traits.shares_directions else whole * len(self.heads),
        )  # fmt: skip

    def with_ranks(
        self, ranks: Sequence[int], heads: Sequence[int], norms: str, pairs: Sequence[tuple[int, ...]] | None = None
    ) -> "AttentionSpec":
        """Returns the layer with other ranks, heads (a subset of its own) and norms. Scale and value ranks are kept.

        The rotary form keeps these `pairs`. By default it keeps the first pairs of each head, as many as its rank
        allows.
        """
        # The keys are indices in the original model, because a compressed layer stores heads in another order.
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
    """Returns the first registered form whose heads share directions, with or without mixed blocks."""
    for form, traits in FORMS.items():
        if traits.shares_directions and traits.mixes_blocks == mixes_blocks:
            return form
    raise NotSupported("no installed package computes attention whose heads share their directions.")


@dataclass(frozen=True, repr=False)
class Spectrum(Displayed):
    """`score[h, i, j] = scale * sum_r strength[h, r] (query[h, r] . x_i) (key[h, r] . x_j)`, where x ends with a 1.

    `owners` is the number of heads, or 1 if all heads share their directions (`shared`). Rows are padded to the largest
    rank, and `used` is False on the padding. With `norms` other than "none", a score is divided by the row norms of
    query and key. The norms are over the kept directions ("kept") or over all original ones ("original"). `heads` are
    the indices of the heads in the original model. Rules get the other maps of a layer in the same format, and `map` is
    the map's name.

    In rotary attention, `pairs` are the frequencies that rotate the rows, or -1 for unrotated rows. `fixed` are the
    layer's maps (LAYER_MAPS) from which nothing can be removed, because a norm runs over all their features.
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
        # Shared directions have one table of rows, but strengths per head.
        for table in (self.query, self.key):
            if table.shape[:2] != (1 if self.shared else heads, directions):
                whose = "shared directions" if self.shared else "directions of their own"
                raise InvalidInput(
                    f"a table of shape {tuple(table.shape)} does not fit {heads} heads with {directions} {whose}."
                )

    @property
    def has_norms(self) -> bool:
        """Whether the scores are divided by the norms of the rows."""
        return self.norms != "none"

    @property
    def has_own_order(self) -> bool:
        """Whether only strengths rank directions. Another basis would change norms or shared directions."""
        return self.has_norms or self.shared

    @property
    def rank(self) -> Float[Tensor, "heads"]:
        """The number of used directions per head, as a float that can be averaged."""
        return self.used.sum(-1).to(self.strength.dtype)
