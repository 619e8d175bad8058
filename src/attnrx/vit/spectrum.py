"""The spectrum of one layer: query rows, key rows and strengths of its score directions."""

from dataclasses import dataclass

from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, repr=False)
class Spectrum(Displayed):
    """`score[h, i, j] = scale * sum_r strength[h, r] (query[h, r] . x_i) (key[h, r] . x_j)`, x with an appended 1.

    `owners` is the number of heads, or 1 if all heads share their directions (`shared`). Rows are padded to the largest
    rank; `used` is False on the padding. With `norms` other than "none" a score is divided by the row norms of query
    and key: over the kept directions ("kept") or over all original ones ("original"). `heads` are the indices of the
    heads in the original model. Rules receive the other maps of a layer in the same form; `map` is the name of the map.

    Of rotary attention `pairs` are the frequencies by which the rows are rotated, -1 for rows that are not. `fixed` are
    the maps of the layer (LAYER_MAPS) of which nothing can be removed, because a norm runs over all of their features.
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
        # Shared directions have one table of rows, and strengths per head.
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
        """Whether only strengths rank directions: another basis would change norms, or directions that heads share."""
        return self.has_norms or self.shared

    @property
    def rank(self) -> Float[Tensor, "heads"]:
        """The number of used directions per head, as a float so that it can be averaged."""
        return self.used.sum(-1).to(self.strength.dtype)
