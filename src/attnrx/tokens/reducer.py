"""The contract of a token reducer."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.errors import NotSupported
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.layout import TokenLayout
from attnrx.tokens.state import TokenState

LAST_LAYER = {"class_attention", "attention", "keys", "value_norms"}
MOMENTS = {"attention_mean", "attention_variance"}
ALL_LAYERS = {*MOMENTS, "class_attention_sum", "accumulated"}


@dataclass(frozen=True)
class Reduction:
    """What a stage leaves: the patches at `kept` (ascending), with these values, and `extra` tokens behind them.

    `sizes` are those of the kept and the extra tokens, where the reducer changes them; None keeps what they had, and
    gives an extra token the size 1.
    """

    kept: Int[Tensor, "batch kept"]
    tokens: Float[Tensor, "batch kept width"]
    extra: Float[Tensor, "batch extra width"] | None = None
    sizes: Float[Tensor, "batch left"] | None = None


@dataclass(frozen=True)
class SampledTokens:
    """What a stage of training leaves, every patch in its place: its values, and the places of what was added.

    A token that the stage adds takes the place of a patch that leaves.
    """

    patches: Float[Tensor, "batch patches width"]
    added: Int[Tensor, "batch added"] | None = None


@dataclass(frozen=True)
class Shape:
    """What a reducer may have to know of the model before any token.

    `heads` are those of the original model: it sees them all, in their order, though some were removed. `directions`
    is the size of the keys that it is shown, where costs are computed, `depth` the number of layers.
    """

    width: int
    heads: int
    layout: TokenLayout
    directions: int = 0
    depth: int = 2


class Reducer(ABC):
    """Decides at every stage of a policy which tokens go on: a frozen dataclass of its knobs.

    `needs` names what it must see. Of the layer before a stage: "class_attention", "attention", "keys", "value_norms"
    (`LAST_LAYER`). Of all layers before (`ALL_LAYERS`): "attention_mean" and "attention_variance", in `moments`; and in
    `accumulated`, summed unless `accumulate` is overridden, a score for every patch: "class_attention_sum", the class
    attention averaged over the heads, or "accumulated", what `layer_score` gave the tokens. And "image_keys", a hash of
    the pixels of every image.

    A reducer with `proportional` tokens changes their sizes, and later attention counts a token as often as its size
    says (the logarithm of the size is added to its scores). A `learned` reducer has a predictor at every stage, or
    `one_predictor` for all of them.
    """

    name: ClassVar[str] = ""
    """The name in text, which REDUCERS gives."""
    proportional: ClassVar[bool] = False
    extra: ClassVar[int] = 0
    """Tokens that a stage adds behind those that it keeps."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ()

    @property
    def learned(self) -> bool:
        """Whether its predictors must be trained before it is of any use."""
        return False

    @property
    def one_predictor(self) -> bool:
        """Whether all stages share one predictor."""
        return False

    def predictor(self, shape: Shape) -> nn.Module:
        """Makes what is learned at one stage."""
        return nn.Module()

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of deciding at a stage that leaves `count` of so many patches: of every matrix product.

        Norms are not counted here, as nowhere in `attnrx.costs`; those of the predictor are found in its modules, and
        taken to see every patch once. Nor are sums and page ranks over maps.
        """
        return 0

    def layer_score(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens"]:
        """Scores every token after one layer, for a reducer that needs their sum."""
        return torch.zeros_like(tokens[..., 0])

    def accumulate(
        self, before: Float[Tensor, "batch patches"] | None, scores: Float[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch patches"]:
        """Adds the scores of one layer to those accumulated `before`, None at the first layer."""
        return scores if before is None else before + scores

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches 2"]:
        """Returns the logarithms of keep and drop for every patch, which a learned reducer is trained by."""
        raise NotSupported(f"{self} has no scores to be trained by.")

    def sampled(
        self, state: TokenState, keep: Float[Tensor, "batch patches"], scores: Float[Tensor, "batch patches 2"]
    ) -> SampledTokens:
        """Returns what goes on in training, where `keep` was drawn by the scores: 1 for a patch that stays, 0 for
        others.

        A draw as inference would select gives what `reduce` leaves, and `keep` passes a gradient on.
        """
        return SampledTokens(state.patches)

    def __str__(self) -> str:
        describe = [
            f"{field.name}={_spelled(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != _default(field)
        ]
        name = self.name or type(self).__name__
        return f"{name}({','.join(describe)})" if describe else name

    @abstractmethod
    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Leaves `count` patches of every image."""


def _default(field: dataclasses.Field) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _spelled(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


class Selecting(Reducer):
    """A reducer that scores the patches and keeps the best."""

    @abstractmethod
    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Says how much every patch matters; what is selected goes by the order within an image alone."""

    def weights(self, relevance: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch patches"]:
        """Turns relevance into weights of 0 or more, by which patches that leave are taken together."""
        return relevance

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the patches of the highest relevance, in their order."""
        kept = best(self.relevance(state, predictor), state.there, count)
        return Reduction(kept, taken(state.patches, kept))


class Predicting(Selecting):
    """A selecting reducer that is learned: its predictor gives the logarithms of keep and drop of every patch."""

    @property
    def learned(self) -> bool:
        """It is."""
        return True

    def relevance(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Returns the logarithm of the odds of keep: as the logarithm of keep itself, but without its end at zero."""
        return odds(self.keep_scores(state, predictor))

    def keep_scores(self, state: TokenState, predictor: nn.Module) -> Float[Tensor, "batch patches 2"]:
        """Returns the logarithms of keep and drop."""
        return predictor(state)

    def weights(self, relevance: Float[Tensor, "batch patches"]) -> Float[Tensor, "batch patches"]:
        """Returns the probability of keep."""
        return relevance.sigmoid()


def odds(scores: Float[Tensor, "batch patches 2"]) -> Float[Tensor, "batch patches"]:
    """Returns the logarithm of the odds of keep from the logarithms of keep and drop."""
    keep, drop = scores.unbind(-1)
    return keep - drop


def best(
    relevance: Float[Tensor, "batch patches"], there: Float[Tensor, "batch patches"], count: int
) -> Int[Tensor, "batch kept"]:
    """Returns the places of the `count` best patches that are still there, ascending; of equals the first."""
    order = relevance.masked_fill(there == 0, float("-inf")).argsort(dim=1, descending=True, stable=True)
    return order[:, :count].sort(dim=1).values


def taken(patches: Float[Tensor, "batch patches width"], kept: Int[Tensor, "batch kept"]) -> Tensor:
    """Returns the patches at these places."""
    return patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[2]))
