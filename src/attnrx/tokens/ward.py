"""Ward: the patches whose merging changes the tokens least become one."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.merging import Merging, Tables, flat_places, rows_of
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

    def closeness(
        self,
        first: Float[Tensor, "batch first features"],
        second: Float[Tensor, "batch second features"],
        first_sizes: Float[Tensor, "batch first"],
        second_sizes: Float[Tensor, "batch second"],
    ) -> Float[Tensor, "batch first second"]:
        """Gives the squared error that merging would add, negative."""
        square = first.norm(dim=-1).square()[..., None] + second.norm(dim=-1).square()[:, None]
        near = torch.baddbmm(square, first, second.transpose(1, 2), beta=-1, alpha=2).clamp_max_(0)
        return near.div_(first_sizes.reciprocal()[..., None] + second_sizes.reciprocal()[:, None])

    def finished(
        self, tables: Tables, merged: Int[Tensor, "batch merged"] | None
    ) -> Float[Tensor, "batch patches width"]:
        """Gives the patches, as long as they should be."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        if merged is None:
            return patches * _stretch(patches, tables["lengths"])
        changed = rows_of(patches, merged)
        changed = changed * _stretch(changed, rows_of(tables["lengths"], merged))
        into = flat_places(merged, patches.shape[1])
        # One that several left into is written as often, the same each time.
        return patches.flatten(0, 1).index_copy_(0, into, changed.flatten(0, 1)).unflatten(0, patches.shape[:2])


def _stretch(
    patches: Float[Tensor, "batch patches width"], lengths: Float[Tensor, "batch patches 1"]
) -> Float[Tensor, "batch patches 1"]:
    return lengths / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6)
