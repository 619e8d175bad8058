"""ToMe: merges the patches with the most similar keys."""

from dataclasses import dataclass

from attnrx.vit.kernels.native_merging import Merged, native_merge
from attnrx.vit.tokens.merging import Merging
from attnrx.vit.tokens.reducer import NativeMerge
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class ToMe(Merging):
    """Merges the patches that are most similar by the cosine of their mean keys over the heads (Bolya et al., 2023).

    Implemented from the paper; see `Merging`. After the first round patches are compared by the means of the merged
    patches' keys, weighted by size. As published a few patches are merged in every layer, between attention and MLP,
    never more than one round; here it is before a layer (`tome:N@every` is the closest schedule).
    """

    @property
    def native(self) -> NativeMerge:
        return native_by_keys


def native_by_keys(state: TokenState, count: int) -> Merged:
    """Merges to `count` patches by the C++ kernel, which compares their keys."""
    return native_merge(state.tokens, state.sizes, state.patch_indices, state.keys, count)
