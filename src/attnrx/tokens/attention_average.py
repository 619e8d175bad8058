"""Attention average: class attention over all layers so far, SPOT's heuristic without a predictor."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class AttentionAverage(Selecting):
    """Keeps the patches of the highest class attention, averaged over heads and all layers before (SPOT, Table 7)."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("class_attention", "moments")

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives the mean over layers and heads."""
        assert seen.moments is not None
        return seen.moments.mean[:, :, 0, seen.prefix :].mean(1)


@dataclass(frozen=True)
class AttentionReceived(Selecting):
    """Keeps the patches that all tokens together attend to most in the layer before; needs no class token."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("attention",)

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives the sum over the tokens that are still there, averaged over the heads."""
        assert seen.attention is not None
        there = (seen.sizes > 0).to(seen.attention.dtype)
        received = (seen.attention * there[:, None, :, None]).sum(2)
        return received[:, :, seen.prefix :].mean(1)
