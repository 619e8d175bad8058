"""Reducers that keep the patches of the highest scores, which come from attention and are not learned."""

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


@dataclass(frozen=True)
class AttentionReceived(Selecting):
    """Keeps the patches that receive the most attention from all tokens in the previous layer; needs no class token."""

    needs = ("attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns the sum over the remaining tokens, averaged over the heads."""
        assert state.attention is not None
        # Masked tokens receive no attention, but their own rows of the map still sum to 1 and must not count.
        present_mask = (state.sizes > 0).to(state.attention.dtype)
        received = (state.attention * present_mask[:, None, :, None]).sum(2)  # over the queries: [batch, heads, tokens]
        return received[:, :, state.prefix :].mean(1)
