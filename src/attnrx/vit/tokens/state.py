"""The tokens of a batch with their statistics, and their layout."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from attnrx.support.modules import is_traced
from attnrx.support.shapes import Float, Int, Tensor


@dataclass
class MapMoments:
    """The mean of the attention maps over the layers so far, and their variance where it is collected, elementwise.

    Memory does not grow with the layers: only sums of the maps and, for the variance, of their squares are stored.
    Attention lies in [0, 1], so the sums of squares are accurate enough for a predictor: in float32 a deviation of a
    hundredth of a map's values is resolved to three digits.
    """

    total: Float[Tensor, "batch heads queries keys"]
    squares: Float[Tensor, "batch heads queries keys"] | None = None
    count: int = 1

    @classmethod
    def of(cls, attention: Float[Tensor, "batch heads queries keys"], variance: bool = True) -> "MapMoments":
        """Returns the moments of the first layer."""
        return cls(attention, attention * attention if variance else None)

    def add_layer(self, attention: Float[Tensor, "batch heads queries keys"]) -> "MapMoments":
        """Returns the moments with one more layer; without gradients the sums are updated in place."""
        squares = self.squares
        if torch.is_grad_enabled() or self.count == 1:  # the first sum shares memory with the map of the first layer
            total = self.total + attention
            squares = None if squares is None else torch.addcmul(squares, attention, attention)
        else:
            total = self.total.add_(attention)
            squares = None if squares is None else squares.addcmul_(attention, attention)
        return MapMoments(total, squares, self.count + 1)

    def at(self, kept: Int[Tensor, "batch kept"]) -> "MapMoments":
        """Returns the moments between the kept tokens."""
        return self._map(lambda sums: _between(sums, kept))

    def with_new(self, count: int) -> "MapMoments":
        """Returns the moments with `count` new tokens, whose sums are zero."""
        return self._map(lambda sums: F.pad(sums, (0, count, 0, count)))

    def without(self, indices: Int[Tensor, "batch removed"]) -> "MapMoments":
        """Returns the moments with the sums of these tokens set to zero, because new tokens overwrote them."""
        # Not in place: the sums may be in an autograd graph, or share memory with the map of the first layer.
        mask = torch.ones_like(self.total[:, 0, :, 0]).scatter(1, indices, 0.0)
        pair_mask = (mask[:, :, None] * mask[:, None, :])[:, None]
        return self._map(lambda sums: sums * pair_mask)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "MapMoments":
        squares = None if self.squares is None else function(self.squares)
        return MapMoments(function(self.total), squares, self.count)

    @property
    def mean(self) -> Float[Tensor, "batch heads queries keys"]:
        return self.total / self.count

    @property
    def variance(self) -> Float[Tensor, "batch heads queries keys"]:
        """The variance over the layers (the mean of the squared deviations), where it was collected."""
        assert self.squares is not None
        if self.count == 1:  # exactly 0, without rounding
            return torch.zeros_like(self.squares)
        # E x^2 - (E x)^2; of almost equal maps rounding can make it negative.
        mean_square = self.squares / self.count
        return torch.addcmul(mean_square, self.total, self.total, value=-1 / self.count**2).clamp_(min=0)


def _between(maps: Float[Tensor, "batch heads queries keys"], kept: Int[Tensor, "batch kept"]) -> Tensor:
    """Returns the rows and columns of some tokens."""
    # Rows first: the columns are then gathered from the smaller [batch, heads, kept, keys].
    batch, heads, queries, keys = maps.shape
    # index_select copies whole rows; gather copies element by element.
    first = torch.arange(batch * heads, device=maps.device).view(batch, heads, 1) * queries
    rows = maps.reshape(-1, keys).index_select(0, (first + kept[:, None, :]).flatten()).view(batch, heads, -1, keys)
    return rows.gather(3, kept[:, None, None, :].expand(-1, heads, kept.shape[1], -1))


@dataclass(frozen=True)
class TokenState:
    """The input of a reducer at a stage. The first `prefix` tokens are not patches and are never pruned.

    `sizes`: how many patches of the image every token represents: 0 for a masked token, 1 for an ordinary one, more for
    a merged one. `class_attention`: the attention from the class token to every token in the previous layer, by head.
    `attention`: the whole map of that layer; `moments`: those of all layers so far. `keys`: the keys averaged over the
    heads. `patch_indices`: the index of every patch token in the image, -1 for one added by an earlier stage.
    `accumulated`: for every patch, the sum over the layers so far of the reducer's `layer_score` or of its class
    attention. `image_keys`: hashes of the images. `value_norms`: the norms of the values, by head. Statistics that the
    reducer does not need are None. `stage` counts from 0; it runs before the layer `layer` (counted from 1) of `depth`
    layers.
    """

    tokens: Float[Tensor, "batch tokens width"]
    prefix: int
    sizes: Float[Tensor, "batch tokens"]
    patch_indices: Int[Tensor, "batch patches"]
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
    unmasked: bool = False
    """Whether no token is masked, so that sums need no mask."""
    unsized: bool = False
    """Whether every token is a patch of the image or precedes them, of size 1."""
    tracked: bool = False
    """Whether a reducer that merges or fuses patches must return their destinations."""

    @property
    def patches(self) -> Float[Tensor, "batch patches width"]:
        """The tokens that may be pruned."""
        return self.tokens[:, self.prefix :]

    @property
    def num_present(self) -> int:
        """The number of remaining patches of every image; static where no token is masked."""
        # A policy of fixed numbers keeps as many patches of every image, so the first one is enough.
        return self.patches.shape[1] if self.unmasked else int(self.present_mask[0].sum())

    @property
    def present_mask(self) -> Float[Tensor, "batch patches"]:
        """1 for every remaining patch, 0 for a pruned one."""
        return (self.sizes[:, self.prefix :] > 0).to(self.tokens.dtype)


@dataclass(frozen=True)
class TokenLayout:
    """`prefix` tokens (class, distillation, registers) precede the `patches` and are never pruned.

    `class_token`: whether the first of them is a class token. `pooled`: the input of the classifier: "class" for prefix
    tokens only, "mean" for the mean of the patches, "max" for the maximum over the patch logits; "mean" and "max" with
    or without prefix tokens.
    """

    prefix: int
    patches: int
    class_token: bool
    pooled: str

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches


def counted(first: int, stop: int, device: torch.device) -> Int[Tensor, "count"]:
    """Returns the integers from `first` to before `stop`."""
    return torch.arange(first, stop, device=device) if is_traced() else _kept_count(first, stop, device)


# Kept, because on a GPU every new tensor is a kernel. Outside inference mode, so that gradients can refer to it.
@lru_cache(maxsize=256)
def _kept_count(first: int, stop: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.arange(first, stop, device=device)


def gathered_rows(
    table: Float[Tensor, "batch rows features"], indices: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Returns some rows of every image."""
    if not (table.device.type == "cpu" or is_traced()):  # one kernel in place of four
        return table.gather(1, indices[..., None].expand(-1, -1, table.shape[2]))
    # index_select copies whole rows; gather copies element by element.
    image = torch.arange(indices.shape[0], device=indices.device)[:, None]
    rows = table.flatten(0, 1).index_select(0, (image * table.shape[1] + indices).flatten())
    return rows.unflatten(0, indices.shape)
