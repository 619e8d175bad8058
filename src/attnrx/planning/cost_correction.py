"""Prices pinned to whole models: what each axis saves there, and what a stage at which tokens leave takes."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from torch import nn

from attnrx.planning.cost_table import CostTable
from attnrx.planning.space import RANKS, TOKENS, Choices, Space
from attnrx.realization import realize

# How many stages the models have that say what one takes: few, some, and one before every layer but the first.
STAGES = (1, 3, None)
# An axis is taken to save so many times what its blocks alone say at most, whatever measured of a model.
MOST = 1.5
OWN = "own"


def corrected(
    cost_table: CostTable, space: Space, beside: Callable[[Mapping[str, nn.Module]], Mapping[str, float]]
) -> CostTable:
    """Makes prices shares of what the model takes as its library ships it, by whole models in measured latency.

    `beside` gives the times of models, by name, as shares of that; they take turns in one run. The model as it is says
    what our own attention takes, those with one axis at a middle level in all layers by how much more or less that axis
    saves than its blocks alone say, and those that let tokens leave at some stages what a stage takes beside the
    layers: what leaves them nearest to the clock, in proportion to the tokens that a stage sees.
    """
    own = Choices.nothing(space.depth)
    ranks = {axis: _everywhere(space, axis) for axis in RANKS if space.available(axis)}
    some = {str(stages): _some_at(space, stages) for stages in STAGES} if TOKENS in space.axes else {}
    models = {name: realize(space.model, space.prescription(at)) for name, at in {**ranks, **some}.items()}
    found = beside({OWN: space.model, **models})
    cost_table = replace(cost_table, whole=cost_table.whole * cost_table.total(own) / found[OWN])
    saved = {axis: (found[OWN] - found[axis], found[OWN] - cost_table.total(at)) for axis, at in ranks.items()}
    cost_table = _saving(
        cost_table,
        {
            axis: min(max(whole_saving / predicted_saving, 0.0), MOST)
            for axis, (whole_saving, predicted_saving) in saved.items()
            if predicted_saving > 0
        },
    )
    if not some:
        return cost_table
    tokens = space.shape.layout.tokens
    missing = np.array([found[name] - cost_table.total(choices) for name, choices in some.items()])
    seen = np.array([_seen_at_stages(choices, tokens) for choices in some.values()]) / cost_table.whole
    return replace(
        cost_table, stages=cost_table.stages + max(missing @ seen / (seen @ seen), 0.0) * np.arange(tokens + 1)
    )


def _everywhere(space: Space, axis: str) -> Choices:
    """The middle one of an axis' levels, in all layers."""
    levels = space.available(axis)
    return replace(Choices.nothing(space.depth), **{axis: (levels[len(levels) // 2],) * space.depth})


def _saving(cost_table: CostTable, factors: Mapping[str, float]) -> CostTable:
    """Lets every axis save so many times as much; what qk and vo only save together, as the lesser of them."""
    attention, mlp = cost_table.attention, cost_table.mlp
    qk, vo = factors.get("qk", 1.0), factors.get("vo", 1.0)
    none = attention[:, :1, :1]
    one, other = attention[:, :, :1] - none, attention[:, :1] - none
    both = attention - none - one - other
    return replace(
        cost_table,
        attention=none + qk * one + vo * other + min(qk, vo) * both,
        mlp=mlp[:, :1] + factors.get("mlp", 1.0) * (mlp - mlp[:, :1]),
    )


def _some_at(space: Space, stages: int | None) -> Choices:
    """As many patches at every stage, half of them in all; the stages are spread over the layers."""
    parts = min(stages or space.depth, space.depth - 1) + 1
    layers = {max(space.depth * part // parts, 1) for part in range(1, parts)}
    count = max(space.patches // (2 * len(layers)), 1)
    return replace(
        Choices.nothing(space.depth), num_pruned=tuple(count * (layer in layers) for layer in range(space.depth))
    )


def _seen_at_stages(choices: Choices, tokens: int) -> int:
    """How many tokens all stages see."""
    before = (0, *choices.left)
    return sum(tokens - gone for gone, count in zip(before, choices.num_pruned, strict=False) if count)
