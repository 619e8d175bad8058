"""Prices by the clock: how long a block takes at every rank and number of tokens, measured on this machine."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from attnrx.costs import Conditions, LatencyProtocol, interleave
from attnrx.costs.conditions import PRECISIONS
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models import family_of
from attnrx.models.blocks import block_names
from attnrx.models.last_layer import last_layer_of
from attnrx.planning.damages import Say
from attnrx.planning.prices import Prices
from attnrx.planning.space import TOKENS, Choices, Space
from attnrx.realization import realize

# The shares of the tokens at which blocks are timed; between them the time is taken to lie on straight lines.
TIMED = (0.15, 0.3, 0.5, 0.75, 1.0)
ROUNDS, WARMUP = 7, 2
# A level that is not faster than the one before by this share is taken to be as fast.
NOISE = 0.015
REFERENCE = "original"


@dataclass(frozen=True)
class Clock:
    """What is timed: batches of so many images, under these conditions, by a clock of `costs.CLOCKS`.

    `apart` times in a new process that keeps its memory (`attnrx.apart`): how fast memory is handed out depends on what
    a process did before, and making a plan is not what the models will be used after.
    """

    batch: int = 32
    conditions: Conditions = field(default_factory=Conditions)
    name: str = "wall"
    rounds: int = ROUNDS
    apart: bool = True

    def __post_init__(self):
        if self.batch < 1 or self.rounds < 2:
            raise InvalidInput(f"batches of {self.batch}, {self.rounds} rounds: give an image and two rounds or more.")

    @property
    def protocol(self) -> LatencyProtocol:
        """The same for two whole models that take turns, more often: it is what a plan promises."""
        return LatencyProtocol(self.conditions, 4 * self.rounds, clock=self.name)

    def images(self, space: Space) -> torch.Tensor:
        """Noise: the time depends on how many images there are, not on what they show."""
        shape = family_of(space.model).input_shape(space.model)
        return torch.randn(self.batch, *shape, generator=torch.Generator().manual_seed(0))


def timed_prices(space: Space, clock: Clock, say: Say) -> Prices:
    """Times one block of every kind at every level and at several numbers of tokens, and the whole model beside it.

    Each time is divided by that of the original's block in the same round. These prices are shares of what our own
    model takes, and say nothing of what letting tokens leave takes in itself: `pinned` does. No level is offered that
    is not faster than those that keep more.

    Raises:
        NotSupported: The layers are not all of one shape.
    """
    family = family_of(space.model)
    if len({layer.spec for layer in family.attention(space.model)}) > 1:
        raise NotSupported("the layers of this model are not all of one shape, so one block does not price the others.")
    tokens = space.shape.layout.tokens
    grid = sorted({max(space.shape.layout.prefix + 1, round(share * tokens)) for share in TIMED})
    timer = _Timer(space, clock, grid)
    attention = np.zeros((len(space.levels), len(space.levels), len(grid)))
    for scores in (0, *space.available("scores")):
        for values in (0, *space.available("values")):
            attention[scores, values] = timer.block({"scores": scores, "values": values})
        say(f"prices: scores at {space.levels[scores]:g}")
    mlp = np.zeros((len(space.levels), len(grid)))
    for level in space.available("mlp"):
        mlp[level] = timer.block({"mlp": level}) - attention[0, 0]
    mlp = _never_slower_mlp(mlp, attention[0, 0], space)
    attention = _never_slower(attention, space)
    last = timer.last() / attention[0, 0]
    every = np.arange(tokens + 1)
    wide = _with_last(_between(every, grid, attention), _between(every, grid, last * attention), space.depth)
    narrow = _with_last(_between(every, grid, mlp), _between(every, grid, last * mlp), space.depth)
    return timer.whole(wide, narrow)


def pinned(prices: Prices, space: Space, beside: Callable[[nn.Module], float]) -> Prices:
    """Makes prices shares of what the model takes as its library ships it, by two whole models on the clock.

    `beside` gives the time of a model as a share of that, in the way in which the plan will be held to account. The
    model as it is says what our own attention takes, and one that lets tokens leave before every layer but the first
    what a stage takes beside the layers.
    """
    own = Choices.nothing(space.depth)
    prices = replace(prices, whole=prices.whole * prices.total(own) / beside(space.model))
    if TOKENS not in space.axes:
        return prices
    some, layout = _some_at_every_layer(space), space.shape.layout
    missing = beside(realize(space.model, space.prescription(some))) - prices.total(some)
    seen = [layout.tokens - gone for gone in (0, *some.left[:-1])]
    at_work = sum(own for own, count in zip(seen, some.leaving, strict=True) if count)
    each = max(missing, 0.0) * prices.whole / at_work
    return replace(prices, stages=prices.stages + each * np.arange(layout.tokens + 1))


def _some_at_every_layer(space: Space) -> Choices:
    """As many patches before every layer but the first, half of them in all."""
    count = max(space.patches // (2 * (space.depth - 1)), 1)
    return replace(Choices.nothing(space.depth), leaving=(0, *((count,) * (space.depth - 1))))


def _with_last(others: np.ndarray, last: np.ndarray, depth: int) -> np.ndarray:
    """Gives the table of every layer. The last may compute less than the others; its ranks then save in proportion."""
    return np.stack([*([others] * (depth - 1)), last])


class _Timer:
    """Times blocks and models under one set of conditions, in units of the original's block at all its tokens."""

    def __init__(self, space: Space, clock: Clock, grid: list[int]):
        self.space, self.clock, self.grid = space, clock, grid
        self.family = family_of(space.model)
        self.original = self._block(space.model)
        width, images = space.shape.width, _at_once(space, clock)
        generator = torch.Generator().manual_seed(0)
        self.rows = {n: torch.randn(images, n, width, generator=generator) for n in grid}
        # A batch may pass in parts; `whole` counts how often a block then runs.
        self.parts = -(-clock.batch // images)

    def _block(self, model: nn.Module, layer: int = 0) -> Callable[[torch.Tensor], Any]:
        return self.clock.conditions.place(model.get_submodule(block_names(model, self.family)[layer]))

    def block(self, levels: Mapping[str, int]) -> np.ndarray:
        """Gives the times of a block at every number of tokens."""
        return self._times(self._block(self._at(levels)) if any(levels.values()) else self.original)

    def last(self) -> np.ndarray:
        """Gives the times of the last block as it runs in the model, which may leave out what nobody reads."""
        model = copy.deepcopy(self.space.model)
        shortened = last_layer_of(model)
        if shortened is not None:
            shortened.at_work = True
        return self._times(self._block(model, -1))

    def _times(self, block: Callable[[torch.Tensor], Any]) -> np.ndarray:
        runs = {str(n): partial(block, self._placed(rows)) for n, rows in self.rows.items()}
        seconds = self._turns({**runs, REFERENCE: partial(self.original, self._placed(self.rows[self.grid[-1]]))})
        return np.array([seconds[str(n)] for n in self.grid])

    def _placed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.clock.conditions.device, PRECISIONS[self.clock.conditions.precision])

    def _at(self, levels: Mapping[str, int]) -> nn.Module:
        choices = Choices.nothing(self.space.depth)
        for axis, level in levels.items():
            if level:
                choices = choices.with_level(axis, 0, level)
        return realize(self.space.model, self.space.prescription(choices))

    def _turns(self, runs: Mapping[str, Callable[[], object]], rounds: int | None = None) -> dict[str, float]:
        """Gives the median over rounds of every time divided by the reference's of the same round."""
        with self.clock.conditions.held():
            seconds = interleave(runs, rounds=rounds or self.clock.rounds, warmup=WARMUP, clock=self.clock.name)
        return {name: float((own / seconds[REFERENCE]).median()) for name, own in seconds.items()}

    def whole(self, attention: np.ndarray, mlp: np.ndarray) -> Prices:
        """Times the whole model, and what is outside its blocks, and gives all prices."""
        space, conditions = self.space, self.clock.conditions
        images = conditions.place_images(self.clock.images(space))
        models = {"own": space.model, "empty": self._empty()}
        runs = {name: partial(conditions.place(model), images) for name, model in models.items()}
        rows = self._placed(self.rows[self.grid[-1]])
        seconds = self._turns({**runs, REFERENCE: partial(self.original, rows)}, 2 * self.clock.rounds)
        own, outside = seconds["own"] / self.parts, seconds["empty"] / self.parts
        # Inside a model a block finds its input warm: the whole says what all of them really take.
        scale = (own - outside) / float(attention[:, 0, 0, -1].sum())
        layout = space.shape.layout
        stages = np.zeros((space.depth, layout.tokens + 1))
        sizes = layout.prefix, layout.patches
        return Prices("latency", "blocks", own, outside, attention * scale, mlp * scale, stages, *sizes)

    def _empty(self) -> nn.Module:
        """The model without its blocks: what is outside them."""
        empty = copy.deepcopy(self.space.model)
        for name in block_names(empty, self.family):
            empty.get_submodule(name).forward = _as_given
        return empty


def _as_given(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tokens


class _Seen:
    """Sees how many images a block is given at once, without hindering that they pass in parts."""

    by_image = True

    def __init__(self):
        self.images = 0

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> None:
        self.images = max(self.images, len(args[0] if args else kwargs["hidden_states"]))


def _at_once(space: Space, clock: Clock) -> int:
    family, conditions = family_of(space.model), replace(clock.conditions, compiled=False, graphs=False)
    seen, model = _Seen(), copy.deepcopy(space.model).eval().to(conditions.device, PRECISIONS[conditions.precision])
    model.get_submodule(block_names(model, family)[0]).register_forward_pre_hook(seen, with_kwargs=True)
    with conditions.held():
        model(conditions.place_images(clock.images(space)))
    return seen.images


def _never_slower(attention: np.ndarray, space: Space) -> np.ndarray:
    """Prices a level at what the next larger rank costs where the clock did not find it faster."""
    scores, values = (0, *space.available("scores")), (0, *space.available("values"))
    found = attention.copy()
    for at, one in enumerate(scores):
        for place, other in enumerate(values):
            if at:
                found[one, other] = _faster(found[one, other], found[scores[at - 1], other])
            if place:
                found[one, other] = _faster(found[one, other], found[one, values[place - 1]])
    return found


def _never_slower_mlp(mlp: np.ndarray, whole: np.ndarray, space: Space) -> np.ndarray:
    levels, found = (0, *space.available("mlp")), mlp.copy()
    for before, level in pairwise(levels):
        found[level] = _faster(whole + found[level], whole + found[before]) - whole
    return found


def _faster(own: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Gives the times of a level where they are faster by more than noise, and those of the level before elsewhere.

    Few directions save less where there are few tokens: every number of tokens stands for itself.
    """
    return np.where(own < (1 - NOISE) * before, own, before)


def _between(every: np.ndarray, grid: list[int], times: np.ndarray) -> np.ndarray:
    flat = times.reshape(-1, len(grid))
    lines = [np.interp(every, [0, *grid], [0.0, *row]) if row.any() else np.zeros(len(every)) for row in flat]
    return np.stack(lines).reshape(*times.shape[:-1], len(every))
