"""The static shape of one attention layer: plain data from which a layer is built, costed and reloaded."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnrx.errors import InvalidInput


@dataclass(frozen=True)
class FormTraits:
    """The properties of a form of attention on which costs, rules, backends and realizations depend.

    `norms` are its normalizations of query and key rows, the default first. `attnrx.attention.forms` computes the
    scores of the form of the same name.
    """

    has_strengths: bool
    shares_directions: bool
    norms: tuple[str, ...]


FORMS: Mapping[str, FormTraits] = {
    "dense": FormTraits(has_strengths=False, shares_directions=False, norms=("none",)),
    "svda": FormTraits(has_strengths=True, shares_directions=False, norms=("kept", "original")),
    "shared": FormTraits(has_strengths=True, shares_directions=True, norms=("none",)),
}
NORMS = tuple(sorted({norm for traits in FORMS.values() for norm in traits.norms}))
BIASES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class AttentionSpec:
    """The numbers of directions and value dimensions of every head of a layer.

    `ranks` are the numbers of score directions per stored head, `heads` the indices of these heads in the original
    model. `norms` is the normalization of the query and key rows: "none" (dense and shared), "kept" (the norm over the
    kept directions) or "original" (the norm over all `original_rank` directions, which the projections then still
    compute). In the shared form (CP SlimAtt) all heads share the directions and have separate strengths. `value_ranks`
    are the value dimensions per stored head (default: head_dim), `biases` the projections with a bias. `scale` is
    stored: it does not depend on the rank.
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

    def __post_init__(self):
        if self.value_ranks is not None and all(rank == self.head_dim for rank in self.value_ranks):
            object.__setattr__(self, "value_ranks", None)  # canonical form, so that equal layers compare equal
        if self.form not in FORMS:
            raise InvalidInput(f"form={self.form!r}: choose from {', '.join(FORMS)}.")
        if self.norms not in FORMS[self.form].norms:
            raise InvalidInput(
                f"form={self.form!r} with norms={self.norms!r}: this form has {' or '.join(FORMS[self.form].norms)}."
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

    def _check_heads(self) -> None:
        if not len(self.ranks) == len(self.heads) == len(self.reads) == len(set(self.heads)):
            raise InvalidInput(
                f"{len(self.ranks)} ranks and {len(self.reads)} value ranks for the heads {self.heads}: give one of "
                "each for each distinct head."
            )
        if any(head < 0 for head in self.heads):
            raise InvalidInput(f"heads {self.heads} are numbers of heads of the original model, from 0.")
        if any(not 0 <= rank <= self.original_rank for rank in self.ranks):
            raise InvalidInput(f"ranks {self.ranks} must lie in 0..{self.original_rank}.")
        if any(not 0 <= rank <= self.head_dim for rank in self.reads):
            raise InvalidInput(f"value ranks {self.reads} must lie in 0..{self.head_dim}.")
        if self.shares_directions and len(set(self.ranks)) > 1:
            raise InvalidInput(f"ranks {self.ranks}: heads that share their directions have the same rank.")

    @classmethod
    def full(cls, form: str, width: int, heads: int) -> "AttentionSpec":
        """Returns the spec of an uncompressed layer: every head has width / heads directions."""
        if heads < 1 or width % heads:
            raise InvalidInput(f"width {width} cannot be divided among {heads} heads; choose a multiple.")
        head_dim = width // heads
        ranks, indices, norms = (head_dim,) * heads, tuple(range(heads)), FORMS[form].norms[0]
        return cls(form, width, head_dim, ranks, indices, head_dim**-0.5, head_dim, norms)

    @property
    def has_strengths(self) -> bool:
        """Whether every direction has a learned strength in every head that uses it."""
        return FORMS[self.form].has_strengths

    @property
    def shares_directions(self) -> bool:
        """Whether all heads share one set of directions."""
        return FORMS[self.form].shares_directions

    @property
    def has_norms(self) -> bool:
        """Whether the rows of query and key are normalized."""
        return self.norms != "none"

    @property
    def keeps_original_norms(self) -> bool:
        """Whether the norms are those over all original directions."""
        return self.norms == "original"

    @property
    def reads(self) -> tuple[int, ...]:
        """The value dimensions of each stored head."""
        return (self.head_dim,) * len(self.heads) if self.value_ranks is None else self.value_ranks

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of the query projection per owner of directions.

        These are the ranks of the heads, or all rows if the original norms are needed; shared directions have one
        owner.
        """
        if self.shares_directions:
            return self.ranks[:1]
        if self.keeps_original_norms:
            return tuple(self.original_rank if rank else 0 for rank in self.ranks)
        return self.ranks

    @property
    def is_full(self) -> bool:
        """Whether every head still has all its directions and value dimensions."""
        has_all_heads = self.heads == tuple(range(len(self.heads)))
        has_all_directions = all(rank == self.original_rank for rank in self.ranks)
        return has_all_heads and has_all_directions and all(rank == self.head_dim for rank in self.reads)

    def has_bias(self, projection: str) -> bool:
        """Whether the projection "query", "key", "value" or "output" has a bias."""
        return projection in self.biases

    def with_ranks(self, ranks: Sequence[int], heads: Sequence[int], norms: str) -> "AttentionSpec":
        """Returns the layer with other ranks, heads (a subset of its own) and norms; scale and value ranks are kept."""
        reads = dict(zip(self.heads, self.reads, strict=True))
        values = tuple(reads[head] for head in heads)
        return replace(self, ranks=tuple(ranks), heads=tuple(heads), norms=norms, value_ranks=values)
