"""Class attention: keeps the patches with the highest attention from the class token."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches with the highest attention from the class token in the previous layer, averaged over heads."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("class_attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        return class_attention(state)


def class_attention(state: TokenState) -> Float[Tensor, "batch patches"]:
    """Returns the attention from the class token to every patch in the previous layer, averaged over the heads."""
    assert state.class_attention is not None
    return state.class_attention[:, :, state.prefix :].mean(1)
