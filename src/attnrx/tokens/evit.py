"""EViT: the patches that the class token looks at, and one token for all others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from attnrx.shapes import Tensor
from attnrx.tokens.class_attention import class_attention
from attnrx.tokens.reducer import Reducer, Reduction, Shape, best, taken
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class EViT(Reducer):
    """Keeps the patches of the highest class attention and fuses the others, weighted by it (Liang et al., 2022).

    The fused token goes on as a patch of its own, beside `count` others. As published the tokens leave between the
    attention and the MLP of a layer; here, as with every reducer, they leave before the next layer.
    """

    needs: ClassVar[tuple[str, ...]] = ("class_attention",)
    extra: ClassVar[int] = 1

    def predictor_macs(self, shape: Shape, patches: int) -> int:
        """MACs of the fused token."""
        return patches * shape.width

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the best and fuses the rest."""
        attention = class_attention(seen)
        kept = best(attention, seen.there, count)
        weights = (attention * seen.there).scatter(1, kept, 0.0)
        return Reduction(kept, taken(seen.patches, kept), fused(seen.patches, weights))


def fused(patches: Tensor, weights: Tensor) -> Tensor:
    """Gives the weighted mean of the patches as one token an image; zeros where no patch has any weight."""
    total = weights.sum(1, keepdim=True)
    shares = weights / total.clamp_min(1e-12 if total.dtype.itemsize > 2 else 1e-6)
    return (shares[:, None] @ patches.to(shares.dtype)).to(patches.dtype)
