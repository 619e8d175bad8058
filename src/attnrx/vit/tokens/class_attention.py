"""Class attention: keeps the patches with the highest attention from the class token."""

from dataclasses import dataclass

from torch import nn

from attnrx.vit.tokens.reducer import PerPatch, Selecting
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches with the highest attention from the class token in the previous layer, averaged over heads."""

    needs = ("class_attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        assert state.class_attention is not None
        return state.class_attention[:, :, state.prefix :].mean(1)
