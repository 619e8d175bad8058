"""Ward: the patches whose merging changes the tokens least become one."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.merging import Merging, Tables
from attnrx.tokens.reducer import Shape
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class Ward(Merging):
    """Merges where the tokens themselves change least (ours; the criterion is that of Ward, 1963).

    Putting a patch of size a and one of size b into their mean adds a b / (a + b) |x - y|^2 to the squared error of
    all tokens. Large groups are therefore merged late, and no layer has to show anything: what is compared is what goes
    on. With `lengths`, a merged token is as long as what it was made of was in the mean: a mean of vectors is shorter
    than they are, and what the layers add to it would weigh more.
    """

    lengths: bool = True

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see: nothing."""
        return ()

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of comparing the two sets by their tokens, in every round."""
        return self.compared(shape.width, patches, count)

    def tables(self, seen: Seen) -> Tables:
        """Gives the patches and their lengths."""
        lengths = {"lengths": seen.patches.norm(dim=-1, keepdim=True)} if self.lengths else {}
        return {"patches": seen.patches, **lengths}

    def closeness(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch first second"]:
        """Gives the squared error that merging would add, negative."""
        patches = tables["patches"]
        squares, light = patches.norm(dim=-1).square(), sizes.reciprocal()
        first, second = patches[:, 0::2], patches[:, 1::2].transpose(1, 2)
        near = torch.baddbmm(_sums(squares), first, second, beta=-1, alpha=2).clamp_max_(0)
        return near.div_(_sums(light))

    def finished(self, tables: Tables, merged: Int[Tensor, "merged"] | None) -> Float[Tensor, "batch patches width"]:
        """Gives the patches, as long as they should be."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        if merged is None:
            return patches * _stretch(patches, tables["lengths"])
        rows = patches.flatten(0, 1)
        changed, lengths = rows.index_select(0, merged), tables["lengths"].flatten(0, 1).index_select(0, merged)
        # One that several left into is written as often, the same each time.
        return rows.index_copy_(0, merged, changed * _stretch(changed, lengths)).view_as(patches)


def _sums(values: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch first second"]:
    """Adds the value of every patch at an even place to that of every one at an odd place."""
    return values[:, 0::2, None] + values[:, None, 1::2]


def _stretch(
    patches: Float[Tensor, "*patches width"], lengths: Float[Tensor, "*patches 1"]
) -> Float[Tensor, "*patches 1"]:
    return lengths / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6)
