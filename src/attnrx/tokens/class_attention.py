"""Class attention: what the class token looks at stays."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches that the class token attends to most in the layer before, averaged over the heads (top-k)."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("class_attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Returns the mean over the heads."""
        return class_attention(state)


def class_attention(state: TokenState) -> Float[Tensor, "batch patches"]:
    """Returns what the class token pays to every patch in the layer before, averaged over the heads."""
    assert state.class_attention is not None
    return state.class_attention[:, :, state.prefix :].mean(1)
