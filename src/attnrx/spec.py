"""The static shape of one attention layer: plain data from which the module is built, priced and reloaded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnrx.errors import InvalidInput

FORMS = ("dense", "svda", "shared")
NORMS = ("none", "kept", "original")
BIASES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class AttentionSpec:
    """How many directions and features every head of a layer has.

    `ranks` lists the score directions of each stored head and `heads` which head of the original model it was.
    `norms` says what the rows of query and key are divided by: nothing (dense and shared), the norm of the directions
    that were kept, or the norm of all `original_rank` directions, which the projections then still compute. In the
    shared form (CP SlimAtt) all heads have the same directions, in strengths of their own. `value_ranks` are the
    features that each stored head reads out (all head_dim of them by default) and `biases` the projections that have
    one. `scale` is a stored fact: it never follows the rank.
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
            object.__setattr__(self, "value_ranks", None)  # one way of saying it, so that equal layers are equal
        if self.form not in FORMS or self.norms not in NORMS:
            raise InvalidInput(f"form={self.form!r}, norms={self.norms!r}: choose from {FORMS} and {NORMS}.")
        if (self.form != "svda") != (self.norms == "none"):
            raise InvalidInput(
                f"form={self.form!r} with norms={self.norms!r}: SVDA always has norms, dense and shared attention none."
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
        if self.form == "shared" and len(set(self.ranks)) > 1:
            raise InvalidInput(f"ranks {self.ranks}: heads that share their directions have the same rank.")

    @classmethod
    def full(cls, form: str, width: int, heads: int) -> "AttentionSpec":
        """The uncompressed layer: every head owns width / heads directions."""
        if heads < 1 or width % heads:
            raise InvalidInput(f"width {width} cannot be divided among {heads} heads; choose a multiple.")
        head_dim = width // heads
        norms = "kept" if form == "svda" else "none"
        return cls(form, width, head_dim, (head_dim,) * heads, tuple(range(heads)), head_dim**-0.5, head_dim, norms)

    @property
    def reads(self) -> tuple[int, ...]:
        """The features that each stored head reads out."""
        return (self.head_dim,) * len(self.heads) if self.value_ranks is None else self.value_ranks

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the query projection that each owner of directions computes.

        They are the ranks of the heads, or all rows where the original norms are needed; shared directions have a
        single owner.
        """
        if self.form == "shared":
            return self.ranks[:1]
        if self.norms == "original":
            return tuple(self.original_rank if rank else 0 for rank in self.ranks)
        return self.ranks

    @property
    def is_full(self) -> bool:
        """Whether the layer still has every direction and every feature of every head."""
        complete = self.heads == tuple(range(len(self.heads)))
        whole = all(rank == self.original_rank for rank in self.ranks)
        return complete and whole and all(rank == self.head_dim for rank in self.reads)

    def has_bias(self, projection: str) -> bool:
        """Whether the projection "query", "key", "value" or "output" has a bias."""
        return projection in self.biases

    def with_ranks(self, ranks: Sequence[int], heads: Sequence[int], norms: str) -> "AttentionSpec":
        """The same layer with other ranks, heads (some of its own) and norms; the scale stays, and what heads read."""
        reads = dict(zip(self.heads, self.reads, strict=True))
        values = tuple(reads[head] for head in heads)
        return replace(self, ranks=tuple(ranks), heads=tuple(heads), norms=norms, value_ranks=values)
