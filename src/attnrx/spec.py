"""The static shape of one attention layer: plain data from which the module is built, priced and reloaded."""

from dataclasses import dataclass, replace

from attnrx.errors import InvalidInput

FORMS = ("dense", "svda")
NORMS = ("none", "kept", "original")


@dataclass(frozen=True)
class AttentionSpec:
    """How many directions and features every head of a layer has.

    `ranks` lists the score directions of each stored head and `heads` which head of the original model it was.
    `norms` says what the rows of query and key are divided by: nothing (dense), the norm of the directions that were
    kept, or the norm of all `original_rank` directions, which the projections then still compute. `scale` is a stored
    fact: it never follows the rank.
    """

    form: str
    width: int
    head_dim: int
    ranks: tuple[int, ...]
    heads: tuple[int, ...]
    scale: float
    original_rank: int
    norms: str = "none"

    def __post_init__(self):
        if self.form not in FORMS or self.norms not in NORMS:
            raise InvalidInput(f"form={self.form!r}, norms={self.norms!r}: choose from {FORMS} and {NORMS}.")
        if (self.form == "dense") != (self.norms == "none"):
            raise InvalidInput(
                f"form={self.form!r} with norms={self.norms!r}: dense attention has no norms, SVDA always has."
            )
        if len(self.ranks) != len(self.heads) or len(set(self.heads)) != len(self.heads):
            raise InvalidInput(
                f"{len(self.ranks)} ranks for the heads {self.heads}: give one rank for each distinct head."
            )
        if any(not 0 <= rank <= self.original_rank for rank in self.ranks):
            raise InvalidInput(f"ranks {self.ranks} must lie in 0..{self.original_rank}.")
        if self.width < 1 or self.head_dim < 1 or self.original_rank < 1:
            raise InvalidInput(
                f"width {self.width}, head_dim {self.head_dim}, rank {self.original_rank} must be positive."
            )

    @classmethod
    def full(cls, form: str, width: int, heads: int) -> "AttentionSpec":
        """The uncompressed layer: every head owns width / heads directions."""
        if heads < 1 or width % heads:
            raise InvalidInput(f"width {width} cannot be divided among {heads} heads; choose a multiple.")
        head_dim = width // heads
        norms = "none" if form == "dense" else "kept"
        return cls(form, width, head_dim, (head_dim,) * heads, tuple(range(heads)), head_dim**-0.5, head_dim, norms)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the query projection that each head computes: its rank, or all of them when the original norms are
        needed.
        """
        if self.norms == "original":
            return tuple(self.original_rank if rank else 0 for rank in self.ranks)
        return self.ranks

    @property
    def is_full(self) -> bool:
        """Whether the layer still has every direction of every head."""
        complete = self.heads == tuple(range(len(self.heads)))
        return complete and all(rank == self.original_rank for rank in self.ranks)

    def with_ranks(self, ranks: tuple[int, ...], heads: tuple[int, ...], norms: str) -> "AttentionSpec":
        """The same layer with other ranks, heads and norms; the scale stays."""
        return replace(self, ranks=ranks, heads=heads, norms=norms)
