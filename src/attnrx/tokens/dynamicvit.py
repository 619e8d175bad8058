"""DynamicViT: a predictor on token features."""

from dataclasses import dataclass

from torch import nn

from attnrx.shapes import Float, Tensor
from attnrx.tokens.predictors import KeepScores, TokenFeatures, feature_macs
from attnrx.tokens.reducer import Predicting, Shape
from attnrx.tokens.state import TokenState


class DynamicViTPredictor(nn.Module):
    """Local and global token features, then log-probabilities of keep and drop."""

    def __init__(self, width: int):
        super().__init__()
        self.features = TokenFeatures(width, width)
        self.scores = KeepScores(width)

    def forward(self, state: TokenState) -> Float[Tensor, "batch patches 2"]:
        """Returns the log-probabilities of keep and drop for every patch."""
        return self.scores(self.features(state.patches, state.there))


@dataclass(frozen=True)
class DynamicViT(Predicting):
    """Keeps the patches that a learned predictor selects, from the tokens and their mean (Rao et al., 2021)."""

    def predictor(self, shape: Shape) -> nn.Module:
        return DynamicViTPredictor(shape.width)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        return feature_macs(shape.width, shape.width, patches) + KeepScores.macs(shape.width, patches)
