"""Ward: merges the patches whose merging changes the tokens least."""

from dataclasses import dataclass

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.native_merging import Merged, native_merge
from attnrx.vit.tokens.merging import Merging, Tables, last_rows
from attnrx.vit.tokens.reducer import Shape
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class Ward(Merging):
    """Merges the patches with the smallest increase of squared error (ours; the criterion is that of Ward, 1963).

    Replacing a patch x of size a and a patch y of size b by their mean adds a b / (a + b) |x - y|^2 to the squared
    error of all tokens. Large groups are therefore merged late. Patches are compared by the tokens themselves, so no
    statistics of a layer are needed. With `lengths`, a merged token is rescaled to the mean norm of its patches: the
    mean of vectors is shorter, and the residual branches of later layers would weigh more.

    With a `relevance` r above 0 the sizes in the criterion are multiplied by 1 - r + r c, where c is the attention that
    the class token pays a patch in the previous layer, mean 1 over the patches: errors of patches that the class token
    does not attend to cost less. The means are weighted by the sizes themselves.
    """

    lengths: bool = True
    relevance: float = 0.0

    def __post_init__(self):
        if not 0 <= self.relevance < 1:
            raise InvalidInput(f"relevance={self.relevance}: give a share from 0 to below 1, e.g. 0.3.")
        # Without relevance patches are compared by the tokens alone.
        object.__setattr__(self, "needs", ("class_attention",) if self.relevance else ())

    def compared_width(self, shape: Shape) -> int:
        return shape.width

    def tables(self, state: TokenState) -> Tables:
        tables = {"patches": state.patches}
        if not self.relevance:
            return tables
        # Relative to the sizes, so that later rounds average them.
        factors = self._weights(state) / state.sizes.clamp_min(1)
        return {**tables, "factors": factors[:, state.prefix :, None]}

    def _weights(self, state: TokenState) -> Float[Tensor, "batch tokens"]:
        """Returns the weights of all tokens in the criterion: 0 for a masked one."""
        if not self.relevance:
            return state.sizes
        assert state.class_attention is not None
        received, prefix = state.class_attention.mean(1), state.prefix
        # Per patch of the image; a masked token receives nothing.
        total = (received / state.sizes.clamp_min(1))[:, prefix:].sum(1, keepdim=True)
        num_present = state.patches.shape[1] if state.unmasked else state.present_mask.sum(1, keepdim=True)
        return state.sizes * (1 - self.relevance) + received * (self.relevance * num_present / total)

    def native_merge(self, state: TokenState, count: int) -> Merged:
        tokens, sizes, indices = state.tokens, state.sizes, state.patch_indices
        return native_merge(tokens, sizes, indices, None, count, self.lengths, self._weights(state))

    def first_tables(self, tables: Tables, features: Tables) -> Tables:
        # Norms are a table of their own: merged like the patches, they become means weighted by size.
        return {**tables, "lengths": features["norms"]} if self.lengths else tables

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"] | None) -> Tables:
        norms = tables["patches"].norm(dim=-1, keepdim=True)
        features = {"patches": tables["patches"], "norms": norms, "squares": norms.square()}
        weights = None if sizes is None else sizes[..., None]
        if "factors" in tables:
            factors = tables["factors"]
            weights = factors if weights is None else last_rows(weights, factors.shape[1]) * factors
        return features if weights is None else {**features, "inverse_weights": weights.reciprocal()}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns half of the negative increase of squared error: |x|^2 + |y|^2 - 2 x y, over 1/a + 1/b."""
        squares = first["squares"] + second["squares"].transpose(1, 2)
        # x y - (|x|^2 + |y|^2) / 2, half of the negative squared distance: [batch, first, second].
        distances = torch.sub(first["patches"] @ second["patches"].transpose(1, 2), squares, alpha=0.5)
        # Rounding can make the squared distance of equal patches negative.
        distances = distances.clamp_max(0)
        if "inverse_weights" not in first:
            return distances
        return distances / (first["inverse_weights"] + second["inverse_weights"].transpose(1, 2))

    def finished(self, tables: Tables) -> Float[Tensor, "batch patches width"]:
        """Returns the patches, rescaled to their stored norms."""
        patches = tables["patches"]
        if "lengths" not in tables:
            return patches
        # A mean of opposite patches can be zero, and stays zero.
        return patches * (tables["lengths"] / patches.norm(dim=-1, keepdim=True).clamp_min(1e-6))
