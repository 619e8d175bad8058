"""The input of a token reducer: the tokens, and statistics of the attention in the layers before."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.image_chunks import Part


@dataclass
class MapMoments:
    """The mean over layers of the attention maps so far, element by element, and their variance where it is collected.

    Sums are held, however many layers there were: of the maps and, for the variance, of their squares. Attention lies
    in [0, 1], so the squares lose nothing that a predictor could see: in float32 a deviation of a hundredth of a map's
    values comes out to three digits.
    """

    total: Float[Tensor, "batch heads queries keys"]
    squares: Float[Tensor, "batch heads queries keys"] | None = None
    count: int = 1

    @classmethod
    def of(cls, attention: Float[Tensor, "batch heads queries keys"], variance: bool = True) -> "MapMoments":
        """Begins with the first layer."""
        return cls(attention, attention * attention if variance else None)

    def then(self, attention: Float[Tensor, "batch heads queries keys"]) -> "MapMoments":
        """Returns the moments with one more layer; where no gradient is wanted the sums are written over."""
        squares = self.squares
        if torch.is_grad_enabled() or self.count == 1:  # the first sum is the map of the first layer itself
            total = self.total + attention
            squares = None if squares is None else torch.addcmul(squares, attention, attention)
        else:
            total = self.total.add_(attention)
            squares = None if squares is None else squares.addcmul_(attention, attention)
        return MapMoments(total, squares, self.count + 1)

    @classmethod
    def room(cls, attention: Float[Tensor, "part heads queries keys"], batch: int, variance: bool) -> "MapMoments":
        """Makes room for the sums of a batch of so many images, of which these are some; `write_` fills it."""
        shape = (batch, *attention.shape[1:])
        return cls(attention.new_empty(shape), attention.new_empty(shape) if variance else None, 0)

    def write_(self, attention: Float[Tensor, "part heads queries keys"], part: Part) -> None:
        """Takes in one more layer for some images; with the last ones it counts."""
        of_part = self.of_images(part.images)
        if self.count:
            of_part.total.add_(attention)
        else:
            of_part.total.copy_(attention)
        if of_part.squares is not None and self.count:
            of_part.squares.addcmul_(attention, attention)
        elif of_part.squares is not None:
            torch.mul(attention, attention, out=of_part.squares)
        self.count += part.is_last

    def of_images(self, images: slice) -> "MapMoments":
        """Returns the moments of some images."""
        return self._changed(lambda sums: sums[images])

    def at(self, kept: Int[Tensor, "batch kept"]) -> "MapMoments":
        """Returns the moments between the tokens that are left."""
        return self._changed(lambda sums: between(sums, kept))

    def with_new(self, count: int) -> "MapMoments":
        """Returns the moments with so many tokens more, which no layer has state yet."""
        return self._changed(lambda sums: F.pad(sums, (0, count, 0, count)))

    def without(self, forgotten: Int[Tensor, "batch forgotten"]) -> "MapMoments":
        """Returns the moments as if no layer had state these tokens: others stand in their places now."""
        known = torch.ones_like(self.total[:, 0, :, 0]).scatter(1, forgotten, 0.0)
        both = (known[:, :, None] * known[:, None, :])[:, None]
        return self._changed(lambda sums: sums * both)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "MapMoments":
        squares = None if self.squares is None else change(self.squares)
        return MapMoments(change(self.total), squares, self.count)

    @property
    def mean(self) -> Float[Tensor, "batch heads queries keys"]:
        """The mean over the layers."""
        return self.total / self.count

    @property
    def variance(self) -> Float[Tensor, "batch heads queries keys"]:
        """The variance over the layers (the mean of the squared deviations), where it was collected."""
        assert self.squares is not None
        mean_square = self.squares / self.count
        return torch.addcmul(mean_square, self.total, self.total, value=-1 / self.count**2).clamp_(min=0)


def between(maps: Float[Tensor, "batch heads queries keys"], kept: Int[Tensor, "batch kept"]) -> Tensor:
    """Returns the rows and the columns of some tokens."""
    batch, heads, queries, keys = maps.shape
    # Whole rows are copied at once, which gather, element by element, does not do.
    first = torch.arange(batch * heads, device=maps.device).view(batch, heads, 1) * queries
    rows = maps.reshape(-1, keys).index_select(0, (first + kept[:, None, :]).flatten()).view(batch, heads, -1, keys)
    return rows.gather(3, kept[:, None, None, :].expand(-1, heads, kept.shape[1], -1))


@dataclass(frozen=True)
class TokenState:
    """All that is known at a stage. The first `prefix` tokens are not patches; they never leave.

    `sizes` says for how many patches of the image every token stands: 0 for one that has left but is still in its
    place (mask), 1 for an ordinary one, more for one that others were merged into. `class_attention` is what the class
    token pays to every token in the layer before, by head; `attention` the whole map of that layer, `moments` those
    of all layers so far; `keys` the mean over the heads of the keys. What a reducer did not ask for is None. `places`
    says which patch of the image every patch token is, -1 for one that an earlier stage added. `accumulated` is, for
    every patch, the sum over the layers so far of what the reducer's `layer_score` gave it or of its class attention.
    `image_keys` are hashes of the images, `value_norms` the lengths of the values, head by head. `stage` counts from 0;
    it runs before the layer `layer` (counted from 1) of `depth` layers.
    """

    tokens: Float[Tensor, "batch tokens width"]
    prefix: int
    sizes: Float[Tensor, "batch tokens"]
    places: Int[Tensor, "batch patches"]
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    moments: MapMoments | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
    accumulated: Float[Tensor, "batch patches"] | None = None
    image_keys: Int[Tensor, "batch"] | None = None
    value_norms: Float[Tensor, "batch heads tokens"] | None = None
    stage: int = 0
    layer: int = 2
    depth: int = 2
    whole: bool = False
    """Whether every token is known to be there still, so that nothing has to be left out of a sum."""

    @property
    def patches(self) -> Float[Tensor, "batch patches width"]:
        """The tokens that may leave."""
        return self.tokens[:, self.prefix :]

    @property
    def present(self) -> int:
        """How many patches of every image are still there; a number of the shapes alone where all are."""
        return self.patches.shape[1] if self.whole else int(self.there[0].sum())

    @property
    def there(self) -> Float[Tensor, "batch patches"]:
        """1 for every patch that is still there, 0 for one that has left."""
        return (self.sizes[:, self.prefix :] > 0).to(self.tokens.dtype)
