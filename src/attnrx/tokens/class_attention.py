"""Class attention: what the class token looks at stays."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches that the class token attends to most in the layer before, averaged over the heads (top-k)."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("class_attention",)

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives the mean over the heads."""
        return class_attention(seen)


def class_attention(seen: Seen) -> Float[Tensor, "batch patches"]:
    """Gives what the class token pays to every patch in the layer before, averaged over the heads."""
    assert seen.class_attention is not None
    return seen.class_attention[:, :, seen.prefix :].mean(1)
