"""Ward: the patches whose merging changes the tokens least become one."""

from dataclasses import dataclass

import torch

from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.merging import Merging, Tables
from attnrx.tokens.reducer import Shape
from attnrx.tokens.state import TokenState


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

    def tables(self, state: TokenState) -> Tables:
        """Returns the patches and their lengths."""
        lengths = {"lengths": state.patches.norm(dim=-1, keepdim=True)} if self.lengths else {}
        return {"patches": state.patches, **lengths}

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Tables:
        """Returns the patches, their squared lengths and the inverse of their sizes."""
        patches = tables["patches"]
        squares, light = patches.norm(dim=-1, keepdim=True).square(), sizes.reciprocal()[..., None]
        return {"patches": patches, "squares": squares, "light": light}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the squared error that merging would add, negative."""
        squares, light = (first[name] + second[name].transpose(1, 2) for name in ("squares", "light"))
        near = torch.baddbmm(squares, first["patches"], second["patches"].transpose(1, 2), beta=-1, alpha=2)
        return near.clamp_max_(0).div_(light)

    def finished(self, tables: Tables, merged: Int[Tensor, "merged"] | None) -> Float[Tensor, "batch patches width"]:
        """Returns the patches, as long as they should be."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        if merged is None:
            return patches * _stretch(patches, tables["lengths"])
        rows = patches.flatten(0, 1)
        changed, lengths = rows.index_select(0, merged), tables["lengths"].flatten(0, 1).index_select(0, merged)
        # One that several left into is written as often, the same each time.
        return rows.index_copy_(0, merged, changed * _stretch(changed, lengths)).view_as(patches)


def _stretch(
    patches: Float[Tensor, "*patches width"], lengths: Float[Tensor, "*patches 1"]
) -> Float[Tensor, "*patches 1"]:
    return lengths / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6)
