"""PiToMe: merges tokens that are similar to many others, and protects isolated ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.merging import Indices, Merging, Tables
from attnrx.vit.tokens.reducer import Shape, TokenState, stable_order


@dataclass(frozen=True)
class PiToMe(Merging):
    """Merges the tokens of the highest energy (Tran et al., NeurIPS 2024: "spectrum-preserving token merging").

    The energy of a patch is the mean over all patches of f(c), c the cosine of their mean keys over the heads: f(c) = c
    above the margin, alpha (exp(c - margin) - 1) below. It is large for patches in large groups of similar ones, such
    as background. The 2 k patches of the highest energy, sorted by it, alternately form the two sets, of which k
    patches are merged; all others are protected. The margin decreases with depth: `margin` (1 - l / L), for the layer l
    (counted from 0) of L whose keys are compared.

    As published a share is merged in every layer, between attention and MLP; here it is before a layer, and where more
    than half must be merged, more rounds follow. Energies count every token once, regardless of its size.
    """

    name: ClassVar[str] = "pitome"
    margin: float = 0.9
    alpha: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.margin <= 1 or not 0 <= self.alpha < float("inf"):
            raise InvalidInput(f"{self}: give a margin from 0 to 1 and an alpha that is finite and not negative.")

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of comparing all pairs of patches, and the two sets, in every round."""
        total = 0
        while patches > count:
            # The two sets have equal sizes, so a round merges at most every second patch.
            merged = min(patches // 2, patches - count)
            total += (patches**2 + merged**2) * shape.directions
            patches -= merged
        return total

    def split(self, state: TokenState, features: Tables, most: int) -> tuple[Indices, Indices]:
        """Sorts the patches by energy, and divides the first ones alternately into the two sets."""
        keys = features["keys"]
        # state.layer counts from 1, and the compared keys are those of the layer before it.
        margin = self.margin * (1 - (state.layer - 2) / state.depth)
        energy = energy_scores(keys @ keys.transpose(1, 2), margin, self.alpha)
        order = stable_order(energy)[:, : 2 * min(most, keys.shape[1] // 2)]
        # Neighbours in this order are in different sets; the first set is as large as the number to merge.
        return order[:, 0::2], order[:, 1::2]


def energy_scores(
    cosines: Float[Tensor, "batch patches others"], margin: float, alpha: float
) -> Float[Tensor, "batch patches"]:
    """Returns the energy of every patch; the cosine with itself adds the same constant to all."""
    below = alpha * ((cosines - margin).exp() - 1)
    return torch.where(cosines >= margin, cosines, below).mean(-1)
