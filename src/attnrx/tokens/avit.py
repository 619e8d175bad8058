"""A-ViT: patches halt whose halting scores, one a layer, add up first."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Selecting
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class AViT(Selecting):
    """Lets the patches leave whose halting scores have added up to most (Yin et al., 2022).

    After every layer a token's halting score is sigmoid(gamma x + beta) of its first feature x, the only one that the
    paper's training gives this meaning. As published a token leaves where its sum reaches 1 - epsilon, at any layer,
    so every image keeps another number. Here the numbers are the policy's: at a stage the patches with the highest sums
    leave, whether they have reached 1 or not. Order is the paper's, the moment is not. On a model that was not trained
    so, the first feature says nothing.
    """

    gamma: float = 5.0
    beta: float = -10.0

    def __post_init__(self):
        if not (math.isfinite(self.gamma) and math.isfinite(self.beta)) or self.gamma == 0:
            raise InvalidInput(f"{self}: gamma scales a feature and beta shifts it; give finite numbers, gamma not 0.")

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("accumulated",)

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        """Gives the halting score of every token."""
        return torch.sigmoid(self.gamma * tokens[..., 0] + self.beta)

    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Gives the sum over the layers, negative."""
        assert seen.accumulated is not None
        return -seen.accumulated

    def weights(self, relevance: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch patches"]:
        """Gives what is left until the sum is 1."""
        return (1 + relevance).clamp(min=0)
