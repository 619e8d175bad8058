"""Ward: merges the patches whose merging changes the tokens least."""

from dataclasses import dataclass
from functools import partial

import torch

from attnrx.kernels.native_merging import native_merge
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.merging import Merging, Tables
from attnrx.tokens.reducer import NativeMerge, Shape
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class Ward(Merging):
    """Merges the patches with the smallest increase of squared error (ours; the criterion is that of Ward, 1963).

    Replacing a patch x of size a and a patch y of size b by their mean adds a b / (a + b) |x - y|^2 to the squared
    error of all tokens. Large groups are therefore merged late. Patches are compared by the tokens themselves, so no
    statistics of a layer are needed. With `lengths`, a merged token is rescaled to the mean norm of its patches: the
    mean of vectors is shorter, and the residual branches of later layers would weigh more.
    """

    lengths: bool = True

    needs = ()  # patches are compared by the tokens themselves

    def compared_width(self, shape: Shape) -> int:
        return shape.width

    def tables(self, state: TokenState) -> Tables:
        return {"patches": state.patches}

    @property
    def native(self) -> NativeMerge:
        return partial(native_merge, lengths=self.lengths)

    def first_tables(self, tables: Tables) -> Tables:
        lengths = {"lengths": tables["patches"].norm(dim=-1, keepdim=True)} if self.lengths else {}
        return {**tables, **lengths}

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Tables:
        patches = tables["patches"]
        squares, inverse_sizes = patches.norm(dim=-1, keepdim=True).square(), sizes.reciprocal()[..., None]
        return {"patches": patches, "squares": squares, "inverse_sizes": inverse_sizes}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the negative increase of squared error: |x|^2 + |y|^2 - 2 x y, over 1/a + 1/b."""
        squares, weights = (first[name] + second[name].transpose(1, 2) for name in ("squares", "inverse_sizes"))
        distances = torch.baddbmm(squares, first["patches"], second["patches"].transpose(1, 2), beta=-1, alpha=2)
        # Rounding can make the squared distance of equal patches negative.
        return distances.clamp_max_(0).div_(weights)

    def finished(self, tables: Tables, merged: Int[Tensor, "merged"] | None) -> Float[Tensor, "batch patches width"]:
        """Returns the patches, rescaled to their stored norms."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        rows, lengths = patches.flatten(0, 1), tables["lengths"].flatten(0, 1)
        if merged is not None:
            rows, lengths = rows.index_select(0, merged), lengths.index_select(0, merged)
        # A mean of opposite patches can be zero, and stays zero.
        stretched = rows * (lengths / rows.norm(dim=-1, keepdim=True).clamp_min(1e-6))
        if merged is not None:
            # A patch with several merged sources is written repeatedly, with the same value.
            stretched = patches.flatten(0, 1).index_copy_(0, merged, stretched)
        return stretched.view_as(patches)
