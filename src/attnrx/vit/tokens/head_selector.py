"""The selector of SPViT: every head scores its share of the token features."""

from dataclasses import dataclass

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.tokens.dynamicvit import KeepScores, TokenFeatures
from attnrx.vit.tokens.reducer import KeepDrop, Predicting, Shape
from attnrx.vit.tokens.state import TokenState


@dataclass(frozen=True)
class HeadSelector(Predicting):
    """Keeps the patches that a learned predictor of several heads selects: SPViT's selector (Kong et al., ECCV 2022).

    The width is divided among the heads. Every head has local and global features of its share and scores it; a branch
    weights the heads of every patch by the mean of each share, and the score is the weighted mean of the heads'
    probabilities. Chosen here: the perceptrons of features and scores are DynamicViT's, shared by the heads; that of
    the branch has two linear maps.
    """

    def predictor(self, shape: Shape) -> nn.Module:
        return HeadSelectorPredictor(shape.width, shape.heads)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        share, heads = shape.width // shape.heads, shape.heads
        return heads * (patches * share**2 + KeepScores.macs(share, patches)) + patches * 2 * heads**2


class HeadSelectorPredictor(nn.Module):
    """The log-probabilities of keep and drop, a weighted mean over the heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise NotSupported(
                f"HeadSelector divides the width among the heads, and {width} is no multiple of {heads}; use "
                "dynamicvit."
            )
        self.heads = heads
        self.features = TokenFeatures(width // heads, width // heads)
        self.scores = KeepScores(width // heads)
        self.head_weights = nn.Sequential(nn.Linear(heads, heads), nn.GELU(), nn.Linear(heads, heads), nn.LogSigmoid())

    def forward(self, state: TokenState) -> KeepDrop:
        shares = state.patches.unflatten(2, (self.heads, -1))  # [batch, patches, heads, share]
        # The heads become images of one batch [batch * heads, patches, share], because they share one predictor.
        present_mask = state.present_mask.repeat_interleave(self.heads, dim=0)
        scores = self.scores(self.features(shares.transpose(1, 2).flatten(0, 1), present_mask))
        return head_mean(scores.unflatten(0, (-1, self.heads)), self.head_weights(shares.mean(-1)))


def head_mean(
    scores: Float[Tensor, "batch heads patches 2"], log_weights: Float[Tensor, "batch patches heads"]
) -> KeepDrop:
    """Returns the logarithm of the weighted mean of the heads' probabilities."""
    # In logarithms, so that small probabilities do not underflow; the second term normalizes the weights.
    weights = log_weights.transpose(1, 2)[..., None]
    return torch.logsumexp(scores + weights, dim=1) - torch.logsumexp(weights, dim=1)
