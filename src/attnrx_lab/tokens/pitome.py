"""PiToMe, which merges tokens that are similar to many others, and protects isolated tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.merging import Indices, Merging, Tables
from attnrx.vit.tokens.reducer import Shape, TokenState, stable_order


@dataclass(frozen=True)
class PiToMe(Merging):
    """Merges the tokens with the highest energy (Tran et al., NeurIPS 2024: "spectrum-preserving token merging").

    The energy of a patch is the mean of f(c) over all patches, where c is the cosine between the keys of the two
    patches after the keys were averaged over the heads. If c is at least the margin, f(c) is c. Otherwise, f(c) is
    alpha (exp(c - margin) - 1). The energy is large for patches in large groups of similar patches, such as background.
    To merge k patches, PiToMe sorts the 2 k patches with the highest energy and puts them alternately into two sets. It
    protects all other patches. The margin decreases with depth. If a model has L layers and the keys come from layer l
    (counted from 0), the margin is `margin` (1 - l / L).

    The paper merges a share of the tokens in every layer, between attention and MLP. In attnrx, tokens are merged
    before a layer, in several rounds if more than half of them must be merged. Energies count every token once, even if
    several patches were merged into it.
    """

    name: ClassVar[str] = "pitome"
    margin: float = 0.9
    alpha: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.margin <= 1 or not 0 <= self.alpha < float("inf"):
            raise InvalidInput(f"{self}: give a margin from 0 to 1 and an alpha that is finite and not negative.")

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of comparing all pairs of patches and of comparing the two sets, over all rounds."""
        total = 0
        while patches > count:
            # The two sets have equal sizes, so a round merges at most half of the patches.
            merged = min(patches // 2, patches - count)
            total += (patches**2 + merged**2) * shape.directions
            patches -= merged
        return total

    def split(self, state: TokenState, features: Tables, most: int) -> tuple[Indices, Indices]:
        """Sorts the patches by energy, and puts the patches with the highest energy alternately into the two sets."""
        keys = features["keys"]
        # state.layer counts from 1, and the compared keys come from the layer before it.
        margin = self.margin * (1 - (state.layer - 2) / state.depth)
        energy = energy_scores(keys @ keys.transpose(1, 2), margin, self.alpha)
        order = stable_order(energy)[:, : 2 * min(most, keys.shape[1] // 2)]
        # Neighbours in this order are in different sets. The first set has one patch for every merge of the round.
        return order[:, 0::2], order[:, 1::2]


def energy_scores(
    cosines: Float[Tensor, "batch patches others"], margin: float, alpha: float
) -> Float[Tensor, "batch patches"]:
    """Returns the energy of every patch. A patch's cosine with itself is included, which does not change the order."""
    below = alpha * ((cosines - margin).exp() - 1)
    return torch.where(cosines >= margin, cosines, below).mean(-1)
