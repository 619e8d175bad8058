"""The tokens of a batch with their statistics, and their layout."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch

from attnrx.support.modules import is_traced
from attnrx.support.shapes import Float, Int, Tensor


class LayerStatistic(ABC):
    """A statistic of the layers so far for every token, or every pair of tokens (`Reducer.add_layer`)."""

    @abstractmethod
    def at(self, kept: Int[Tensor, "batch kept"]) -> "LayerStatistic":
        """Returns the statistic of the kept tokens, by their indices among all tokens."""

    @abstractmethod
    def with_new(self, count: int) -> "LayerStatistic":
        """Returns the statistic with `count` new tokens, which have no past."""

    @abstractmethod
    def without(self, indices: Int[Tensor, "batch removed"]) -> "LayerStatistic":
        """Returns the statistic in which these tokens have no past, because new tokens overwrote them."""


@dataclass(frozen=True)
class TokenState:
    """The input of a reducer at a stage. The first `prefix` tokens are not patches and are never pruned.

    `sizes`: how many patches of the image every token represents: 0 for a masked token, 1 for an ordinary one, more for
    a merged one. `class_attention`: the attention from the class token to every token in the previous layer, by head.
    `attention`: the whole map of that layer; `keys`: the keys averaged over the heads; `value_norms`: the norms of the
    values, by head. `statistic`: that of all layers so far (`Reducer.add_layer`). `patch_indices`: the index of every
    patch token in the image, -1 for one added by an earlier stage. `image_keys`: those of `Reducer.image_keys`. What
    the reducer does not need is None. `stage` counts from 0; it runs before the layer `layer` (counted from 1) of
    `depth` layers.
    """

    tokens: Float[Tensor, "batch tokens width"]
    prefix: int
    sizes: Float[Tensor, "batch tokens"]
    patch_indices: Int[Tensor, "batch patches"]
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    statistic: LayerStatistic | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
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
