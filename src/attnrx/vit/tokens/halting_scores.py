"""The halting rule of A-ViT."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.reducer import PerPatch, Selecting
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class HaltingScores(Selecting):
    """Prunes the patches whose halting scores have the largest sum: the rule of A-ViT (Yin et al., CVPR 2022).

    After every layer a token's halting score is sigmoid(gamma x + beta) of its first feature x. Training with the
    losses `Ponder` and `HaltingPrior` makes x a halting score; without it x has no such meaning, and results are not
    those of A-ViT. In A-ViT tokens halt at any layer where their sum reaches 1 - epsilon, so the number of kept tokens
    differs between images; here the numbers are the policy's, and only the order is A-ViT's. The class token, whose
    layers A-ViT averages with halting probabilities, does not halt here.
    """

    # The values of the paper.
    gamma: float = 5.0
    beta: float = -10.0

    needs = ("accumulated",)

    def __post_init__(self):
        if not (math.isfinite(self.gamma) and math.isfinite(self.beta)) or self.gamma == 0:
            raise InvalidInput(f"{self}: gamma scales a feature and beta shifts it; give finite numbers, gamma not 0.")

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        return torch.sigmoid(self.gamma * tokens[..., 0] + self.beta)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        assert state.accumulated is not None
        return -state.accumulated  # the patch of the largest sum is the first to halt

    def weights(self, relevance: PerPatch) -> PerPatch:
        """Returns the remainder 1 - sum of the halting scores, at least 0."""
        # `relevance` is minus the sum. The clamp: under a policy's numbers a patch may stay beyond a sum of 1.
        return (1 + relevance).clamp(min=0)
