"""Prices by measured latency: how long a block takes at every rank and number of tokens, measured on this machine."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from attnrx.costs import Conditions, LatencyProtocol, interleave
from attnrx.costs.conditions import PRECISIONS
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models import TokenReduction, attach_tokens_, family_of
from attnrx.models.blocks import block_names
from attnrx.models.last_layer import last_layer_of
from attnrx.planning.cost_table import CostTable
from attnrx.planning.monotone_fit import never_slower, never_slower_mlp
from attnrx.planning.space import TOKENS, Choices, Space
from attnrx.progress import Log
from attnrx.realization import realize
from attnrx.shapes import Float, Tensor
from attnrx.tokens import TokenPolicy

# The shares of the tokens at which blocks are timed; between them the time is taken to lie on straight lines.
TIMED = (0.25, 0.5, 0.75, 1.0)
# Tokens leave before this layer, and the block after it is timed: it is the first that may see tokens of several sizes.
# What share stays does not matter: the block is given as many as it is to be timed with.
AFTER, SOME = 2, 0.75
ROUNDS, WARMUP = 7, 2
REFERENCE, ALL = "original", "all"


@dataclass(frozen=True)
class TimingSettings:
    """What is timed: batches of so many images, under these conditions, by a clock of `costs.CLOCKS`.

    `in_subprocess` times in a new process that keeps its memory (`attnrx.subprocess_runner`): how fast memory is handed
    out depends on what a process did before, and making a plan is not what the models will be used after.
    """

    batch: int = 32
    conditions: Conditions = field(default_factory=Conditions)
    name: str = "wall"
    rounds: int = ROUNDS
    in_subprocess: bool = True

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


def measured_cost_table(space: Space, timing: TimingSettings, log: Log) -> CostTable:
    """Times one block of every kind at every level and at several numbers of tokens, and the whole model beside it.

    Where tokens have left, attention may count the sizes of the others, and does in what is timed. Each time is
    divided by that of the original's block in the same round. These prices are shares of what our own model takes,
    and say nothing of what letting tokens leave takes in itself: `pinning` does. No level is offered that is not
    faster than those that keep more.

    Raises:
        NotSupported: The layers are not all of one shape.
    """
    family = family_of(space.model)
    if len({layer.spec for layer in family.attention(space.model)}) > 1:
        raise NotSupported("the layers of this model are not all of one shape, so one block does not price the others.")
    tokens = space.shape.layout.tokens
    grid = sorted({max(space.shape.layout.prefix + 1, round(share * tokens)) for share in TIMED})
    timer = _Timer(space, timing, grid)
    attention = np.zeros((len(space.levels), len(space.levels), len(grid) + 1))
    for qk in (0, *space.available("qk")):
        for vo in (0, *space.available("vo")):
            attention[qk, vo] = timer.block({"qk": qk, "vo": vo})
        log(f"prices: qk at {space.levels[qk]:g}")
    attention = never_slower(attention, space)
    mlp = np.zeros((len(space.levels), len(grid) + 1))
    for level in space.available("mlp"):
        mlp[level] = timer.block({"mlp": level}) - attention[0, 0]
    mlp = never_slower_mlp(mlp, space)
    last = timer.last() / attention[0, 0]
    every = np.arange(tokens + 1)
    wide = _with_last(_between(every, grid, attention), _between(every, grid, last * attention), space.depth)
    narrow = _with_last(_between(every, grid, mlp), _between(every, grid, last * mlp), space.depth)
    return timer.whole(wide, narrow)


def _with_last(others: np.ndarray, last: np.ndarray, depth: int) -> np.ndarray:
    """Returns the table of every layer. The last may compute less than the others; its ranks then save in
    proportion."""
    return np.stack([*([others] * (depth - 1)), last])


class _AfterStage(nn.Module):
    """A block as it runs after a stage at which tokens have left: every token that is there has a size."""

    def __init__(self, block: nn.Module, reduction: TokenReduction):
        super().__init__()
        self.block, self.reduction = block, reduction

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Any:
        self.reduction.run.begin()
        self.reduction.run.sizes = tokens.new_ones(tokens.shape[:2])
        return self.block(tokens)


class _Timer:
    """Times blocks and models under one set of conditions, in units of the original's block at all its tokens.

    The block of a model that stands for the others is the first after a stage, if there could be one.
    """

    def __init__(self, space: Space, timing: TimingSettings, grid: list[int]):
        self.space, self.timing, self.grid = space, timing, grid
        self.family = family_of(space.model)
        self.leaves = TOKENS in space.axes and space.depth > AFTER
        self.layer = AFTER if self.leaves else 0
        self.original = self._place(space.model, self.layer)
        width, images = space.shape.width, _at_once(space, timing)
        generator = torch.Generator().manual_seed(0)
        self.rows = {n: torch.randn(images, n, width, generator=generator) for n in grid}
        # A batch may pass in parts; `whole` counts how often a block then runs.
        self.parts = -(-timing.batch // images)

    def _place(self, model: nn.Module, layer: int) -> Callable[[torch.Tensor], Any]:
        return self.timing.conditions.place(model.get_submodule(block_names(model, self.family)[layer]))

    def _place_after_stage(self, model: nn.Module, layer: int) -> Callable[[torch.Tensor], Any]:
        reducer, model = self.space.reducer, copy.deepcopy(model)
        assert reducer is not None
        reduction = attach_tokens_(model, self.family, TokenPolicy(reducer, (AFTER,), (SOME,)))
        block = model.get_submodule(block_names(model, self.family)[layer])
        return self.timing.conditions.place(_AfterStage(block, reduction))

    def block(self, levels: Mapping[str, int]) -> np.ndarray:
        """Returns the times of a block at several numbers of tokens, after a stage, and at last at all of them
        before."""
        return self._times(self._at(levels) if any(levels.values()) else self.space.model, self.layer)

    def last(self) -> np.ndarray:
        """Returns the times of the last block as it runs in the model, which may compute the class token alone."""
        model = copy.deepcopy(self.space.model)
        shortened = last_layer_of(model)
        if shortened is not None:
            shortened.at_work = True
        return self._times(model, self.space.depth - 1)

    def _times(self, model: nn.Module, layer: int) -> np.ndarray:
        before = self._place(model, layer)
        after = self._place_after_stage(model, layer) if self.leaves else before
        rows = {n: self._placed(own) for n, own in self.rows.items()}
        runs: dict[str, Callable[[], Any]] = {str(n): partial(after, own) for n, own in rows.items()}
        every = rows[self.grid[-1]]
        seconds = self._turns({**runs, ALL: partial(before, every), REFERENCE: partial(self.original, every)})
        return np.array([seconds[name] for name in (*runs, ALL)])

    def _placed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.timing.conditions.device, PRECISIONS[self.timing.conditions.precision])

    def _at(self, levels: Mapping[str, int]) -> nn.Module:
        choices = Choices.nothing(self.space.depth)
        for axis, level in levels.items():
            if level:
                choices = choices.with_level(axis, self.layer, level)
        return realize(self.space.model, self.space.prescription(choices))

    def _turns(self, runs: Mapping[str, Callable[[], object]], rounds: int | None = None) -> dict[str, float]:
        """Returns the median over rounds of every time divided by the reference's of the same round."""
        with self.timing.conditions.held():
            seconds = interleave(runs, rounds=rounds or self.timing.rounds, warmup=WARMUP, clock=self.timing.name)
        return {name: float((own / seconds[REFERENCE]).median()) for name, own in seconds.items()}

    def whole(self, attention: np.ndarray, mlp: np.ndarray) -> CostTable:
        """Times the whole model, and what is outside its blocks, and returns all prices."""
        space, conditions = self.space, self.timing.conditions
        images = conditions.place_images(self.timing.images(space))
        models = {"own": space.model, "empty": self._empty()}
        runs = {name: partial(conditions.place(model), images) for name, model in models.items()}
        rows = self._placed(self.rows[self.grid[-1]])
        seconds = self._turns({**runs, REFERENCE: partial(self.original, rows)}, 2 * self.timing.rounds)
        own, outside = seconds["own"] / self.parts, seconds["empty"] / self.parts
        # Inside a model a block finds its input warm: the whole says what all of them really take.
        scale = (own - outside) / float(attention[:, 0, 0, -1].sum())
        layout = space.shape.layout
        stages = np.zeros((space.depth, layout.tokens + 1))
        sizes = layout.prefix, layout.patches
        return CostTable("latency", "blocks", own, outside, attention * scale, mlp * scale, stages, *sizes)

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


def _at_once(space: Space, timing: TimingSettings) -> int:
    family, conditions = family_of(space.model), replace(timing.conditions, compiled=False, graphs=False)
    seen, model = _Seen(), copy.deepcopy(space.model).eval().to(conditions.device, PRECISIONS[conditions.precision])
    model.get_submodule(block_names(model, family)[0]).register_forward_pre_hook(seen, with_kwargs=True)
    with conditions.held():
        model(conditions.place_images(timing.images(space)))
    return seen.images


def _between(every: np.ndarray, grid: list[int], times: np.ndarray) -> np.ndarray:
    """Returns the times at every number of tokens: on lines between those after a stage, and what all of them take."""
    flat = times.reshape(-1, len(grid) + 1)
    lines = [np.where(every < grid[-1], np.interp(every, [0, *grid], [0.0, *row[:-1]]), row[-1]) for row in flat]
    return np.stack(lines).reshape(*times.shape[:-1], len(every))
