"""Soft reducers: the scores of another decide what leaves, and something of what leaves stays."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor
from attnrx.tokens.reducer import Reducer, Reduction, SampledTokens, Selecting, Shape, best, odds, taken
from attnrx.tokens.state import TokenState


@dataclass(frozen=True)
class Soft(Reducer):
    """Goes by the relevance that `scores` gives, any selecting reducer; what that sees and learns, this does."""

    scores: Selecting

    def __post_init__(self):
        if not isinstance(self.scores, Selecting):
            name, given = type(self).__name__, type(self.scores).__name__
            raise InvalidInput(
                f"{name} goes by the scores of another reducer, and {given} gives no scores; "
                "take e.g. DynamicViT, Spot or ClassAttention."
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """What the scores need."""
        return self.scores.needs

    @property
    def learned(self) -> bool:
        """Whether the scores are learned."""
        return self.scores.learned

    @property
    def one_predictor(self) -> bool:
        """Whether all stages share one predictor."""
        return self.scores.one_predictor

    def predictor(self, shape: Shape) -> nn.Module:
        """Makes the predictor of the scores."""
        return self.scores.predictor(shape)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of the predictor of the scores."""
        return self.scores.predictor_macs(shape, patches, count)

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches 2"]:
        """Returns the logarithms of keep and drop that the scores give, which training draws by."""
        return self.scores.keep_scores(state, predictor)

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        """Scores every token after one layer as the scores do."""
        return self.scores.layer_score(tokens)

    def accumulate(
        self, before: Float[Tensor, "batch patches"] | None, scores: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch patches"]:
        """Accumulates as the scores do."""
        return self.scores.accumulate(before, scores)


class Packaging(Soft):
    """Keeps the best patches, and one token for all that leave: their mean, weighted by what the scores give them.

    That token goes on as a patch of its own, beside `count` others; a later stage treats it as any patch.
    """

    extra: ClassVar[int] = 1

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of the predictor of the scores, and of the token for the rest."""
        return super().predictor_macs(shape, patches, count) + patches * shape.width

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the best and fuses the rest."""
        relevance = self.scores.relevance(state, predictor)
        kept = best(relevance, state.there, count)
        weights = self.scores.weights(relevance).masked_fill(state.there == 0, 0.0).scatter(1, kept, 0.0)
        return Reduction(kept, taken(state.patches, kept), fused(state.patches, weights))

    def sampled(
        self, state: TokenState, keep: Float[Tensor, "batch patches"], scores: Float[Tensor, "batch patches 2"]
    ) -> SampledTokens:
        """Writes the token for the rest into the place of the first patch that leaves."""
        num_pruned = state.there * (1 - keep)
        package = fused(state.patches, self.scores.weights(odds(scores)) * num_pruned)
        place = num_pruned.detach().argmax(1, keepdim=True)
        return SampledTokens(state.patches.scatter(1, place[..., None].expand_as(package), package), place)


def fused(patches: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean of the patches as one token an image; zeros where no patch has any weight."""
    total = weights.sum(1, keepdim=True)
    shares = weights / total.clamp_min(1e-12 if total.dtype.itemsize > 2 else 1e-6)
    return (shares[:, None] @ patches.to(shares.dtype)).to(patches.dtype)
