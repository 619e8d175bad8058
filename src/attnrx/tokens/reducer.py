"""The contract of a token reducer."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from attnrx.errors import NotSupported
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens.layout import TokenLayout
from attnrx.tokens.seen import Seen

NEEDS = ("class_attention", "attention", "moments", "keys")


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
class Shape:
    """What a reducer may have to know of the model before it has seen a token.

    `heads` are those of the original model: it sees them all, in their order, though some were removed. `directions`
    is the size of the keys that it is shown, where costs are asked for.
    """

    width: int
    heads: int
    layout: TokenLayout
    directions: int = 0


class Reducer(ABC):
    """Decides at every stage of a policy which tokens go on: a frozen dataclass of its knobs.

    `needs` names what of the layers before it must see: "class_attention" and "attention" of the last layer,
    "moments" of all layers, "keys" of the last layer. A reducer with `proportional` tokens changes their sizes, and
    later attention counts a token as often as its size says (the logarithm of the size is added to its scores).
    A `learned` reducer has a predictor at every stage.
    """

    name: ClassVar[str] = ""
    """The name in text, which REDUCERS gives."""
    needs: ClassVar[tuple[str, ...]] = ()
    learned: ClassVar[bool] = False
    proportional: ClassVar[bool] = False
    extra: ClassVar[int] = 0
    """Tokens that a stage adds behind those that it keeps."""

    def predictor(self, shape: Shape) -> nn.Module:
        """Makes what is learned at one stage."""
        return nn.Module()

    def predictor_macs(self, shape: Shape, patches: int) -> int:
        """MACs of deciding at a stage with so many patches left: of every matrix product.

        Norms are not counted here, as nowhere in `attnrx.costs`; those of the predictor are found in its modules, and
        taken to see every patch once.
        """
        return 0

    def keep_scores(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches 2"]:
        """Gives the logarithms of keep and drop for every patch, which a learned reducer is trained by."""
        raise NotSupported(f"{self} has no scores to be trained by.")

    def least(self, patches: int) -> int:
        """The fewest patches that a stage can leave of so many."""
        return 1

    def __str__(self) -> str:
        told = [
            f"{field.name}={_spelled(getattr(self, field.name))}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) != field.default
        ]
        name = self.name or type(self).__name__
        return f"{name}({','.join(told)})" if told else name

    @abstractmethod
    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Leaves `count` patches of every image."""


def _spelled(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


class Selecting(Reducer):
    """A reducer that scores the patches and keeps the best."""

    @abstractmethod
    def relevance(self, seen: Seen, predictor: nn.Module) -> Float[Tensor, "batch patches"]:
        """Says how much every patch matters; only the order within an image counts."""

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the patches of the highest relevance, in their order."""
        kept = best(self.relevance(seen, predictor), seen.there, count)
        return Reduction(kept, taken(seen.patches, kept))


def best(
    relevance: Float[Tensor, "batch patches"], there: Float[Tensor, "batch patches"], count: int
) -> Int[Tensor, "batch kept"]:
    """Gives the places of the `count` best patches that are still there, ascending; of equals the first."""
    order = relevance.masked_fill(there == 0, float("-inf")).argsort(dim=1, descending=True, stable=True)
    return order[:, :count].sort(dim=1).values


def taken(patches: Float[Tensor, "batch patches width"], kept: Int[Tensor, "batch kept"]) -> Tensor:
    """Gives the patches at these places."""
    return patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[2]))
