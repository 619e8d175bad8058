"""Attention average: class attention over all layers so far, SPOT's heuristic without a predictor."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class AttentionAverage(Selecting):
    """Keeps the patches of the highest class attention, averaged over heads and all layers before (SPOT, Table 7).

    One row of every map is computed and one number a patch held: their sum, which orders patches as the mean does.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """The class attention, summed over the layers."""
        return ("class_attention", "class_attention_sum")

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Returns the sum over the layers of the mean over the heads."""
        assert state.accumulated is not None
        return state.accumulated


@dataclass(frozen=True)
class AttentionReceived(Selecting):
    """Keeps the patches that all tokens together attend to most in the layer before; needs no class token."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Returns the sum over the tokens that are still there, averaged over the heads."""
        assert state.attention is not None
        there = (state.sizes > 0).to(state.attention.dtype)
        received = (state.attention * there[:, None, :, None]).sum(2)
        return received[:, :, state.prefix :].mean(1)
