"""ToMe: merges the patches with the most similar keys."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.merging import Merging, Tables
from attnrx.tokens.reducer import Shape
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class ToMe(Merging):
    """Merges the patches that are most similar by the cosine of their mean keys over the heads (Bolya et al., 2023).

    Implemented from the paper; see `Merging`. After the first round patches are compared by the means of the merged
    patches' keys, weighted by size. As published a few patches are merged in every layer, between attention and MLP,
    never more than one round; here it is before a layer (`tome:N@every` is the closest schedule).
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return ("keys",)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of comparing the two sets by their keys, in every round."""
        return self.compared(shape.directions, patches, count)

    def tables(self, state: TokenState) -> Tables:
        assert state.keys is not None
        return {"patches": state.patches, "keys": state.keys[:, state.prefix :]}

    def features(self, tables: Tables, sizes: Float[Tensor, "batch patches"]) -> Tables:
        """Returns the keys, normalized to length 1."""
        return {"keys": nn.functional.normalize(tables["keys"], dim=-1)}

    def closeness(self, first: Tables, second: Tables) -> Float[Tensor, "batch first second"]:
        """Returns the cosine similarity of the keys."""
        return first["keys"] @ second["keys"].transpose(1, 2)
