"""Cost tables: the costs of every layer by ranks and tokens, without building a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from attnrx.change.realization import compressed_spec
from attnrx.decide.planning.space import RANKS, Choices, Space
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.vit.costs import LayerCosts, ModelCosts
from attnrx.vit.maps import COST_PARTS, LINEAR_MAPS, REALIZED_NORMS
from attnrx.vit.models import family_of, hidden_units, linear_units, rank_of, require_all_tokens
from attnrx.vit.tokens import Shape

# The cost parts that grow quadratically with the number of tokens.
SQUARE = ("scores", "fusion", "read_out")
# Costs of compressed blocks as shares of those of the whole block: below and above these a table is nonsense. The
# savings of attention and MLP are added up, so that the least costs can be slightly negative.
BELOW, ABOVE = 0.1, 2.0


def prescribed_costs(model: nn.Module, prescription: Prescription, norms: str = REALIZED_NORMS[0]) -> ModelCosts:
    """Returns the costs of the model after the prescription (qk, vo, MLP and tokens) without realizing it."""
    require_all_tokens(model, "compute the costs of a prescription on")
    family = family_of(model)
    # The specs of the layers after `realize`; below, the ranks of both MLP maps and the numbers of hidden units.
    pairs = zip(family.attention(model), prescription.layers, strict=True)
    specs = tuple(compressed_spec(attention.spec, layer, norms) for attention, layer in pairs)
    ranks = tuple(
        tuple(
            # A map without a decision costs what it does now, which may be a factored one.
            sum(layer.outputs[name].ranks) if name in layer.outputs else rank_of(linear)
            for name, linear in zip(LINEAR_MAPS, pair, strict=True)
        )
        # Not strict: a model whose MLPs are not pairs of linear maps has none here.
        for pair, layer in zip(family.mlp(model), prescription.layers, strict=False)
    )
    hidden = tuple(
        _kept_units(units, specs[0].width, layer)
        for units, layer in zip(hidden_units(family.mlp(model)), prescription.layers, strict=False)
    )
    policy = None if prescription.tokens is None else prescription.tokens.policy
    return family.costs(model, specs, tuple((first, second) for first, second in ranks), policy, hidden)


def _kept_units(units: int, width: int, layer: LayerPrescription) -> int:
    if layer.in_place_of("MLP") is not None:
        return linear_units(units, width)
    return units if layer.hidden is None else int(layer.hidden.keep.sum())


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every layer by ranks and tokens; `whole` is that of the original.

    The `quantity` is "latency" (of any unit of time), "macs" or "params".

    `attention` is [layer, level of qk, level of vo, tokens], `mlp` [layer, level, tokens], with an entry for every
    number of tokens from none to all. `stages` [layer, tokens] is the cost of a token reducer before a layer, by the
    number of its input tokens. `outside` is the cost outside the blocks. `spread` is the interquartile range of the
    timings as a share of their median, 0 for exact costs.
    """

    quantity: str
    whole: float
    outside: float
    attention: np.ndarray
    mlp: np.ndarray
    stages: np.ndarray
    prefix: int
    patches: int
    spread: float = 0.0

    def problem(self) -> str | None:
        """Returns why these costs cannot be those of a model; None if they can.

        Timings under the load of other processes can give costs that are negative, or that rise where less is computed.
        """
        numbers = (self.attention, self.mlp, self.stages, self.outside, self.whole)
        if not all(np.isfinite(each).all() for each in numbers):
            return "a cost is not finite"
        # [layers, levels of qk, levels of vo, tokens] with the full MLP, which is a part of these costs, and with the
        # least one.
        full = self.attention[:, 0, 0, -1]
        least = (self.attention + self.mlp.min(axis=1)[:, None, None]).min(axis=(1, 2, 3))
        largest = (self.attention + self.mlp.max(axis=1)[:, None, None]).max(axis=(1, 2, 3))
        share = (self.outside + full.sum() + self.mlp[:, 0, -1].sum()) / self.whole if self.whole > 0 else -1.0
        if min(self.whole, share) <= 0 or self.outside < 0 or (full + self.mlp[:, 0, -1] <= 0).any():
            return "the cost of the model, of a block or of what is outside the blocks is not positive"
        layers = full + self.mlp[:, 0, -1]
        if (least < -BELOW * layers).any():
            return f"a compressed block costs {float((least / layers).min()):.2g} of the block"
        if (largest > ABOVE * layers).any() or (self.stages < 0).any():
            return f"a compressed block costs {float((largest / layers).max()):.2g} of the block"
        return None

    def layer(self, choices: Choices, layer: int, gone: int) -> float:
        """Returns the cost of one layer with `gone` patches pruned before it."""
        tokens = self.prefix + self.patches - gone
        return float(
            self.attention[layer, choices.qk[layer], choices.vo[layer], tokens]
            + self.mlp[layer, choices.mlp[layer], tokens]
        )

    def total(self, choices: Choices) -> float:
        """Returns the cost of the whole model as a share of the original's."""
        left = choices.left
        layers = sum(self.layer(choices, index, gone) for index, gone in enumerate(left))
        gone_before = (0, *left)
        stages = sum(
            float(self.stages[index, self.prefix + self.patches - gone_before[index]])
            for index, count in enumerate(choices.num_pruned)
            if count
        )
        return (self.outside + layers + stages) / self.whole


def exact_cost_table(space: Space, quantity: str) -> CostTable:
    """Returns the cost table of MACs or parameters in closed form."""
    model = space.model
    before = family_of(model).costs(model)
    tokens = before.layers[0].tokens
    # Costs are linear or quadratic in the number of tokens: one evaluation per level gives those at all numbers.
    steps = np.arange(tokens + 1) / tokens
    tables = {axis: _by_level(space, before, axis, quantity, steps) for axis in RANKS}
    # No part depends on the levels of both axes, so the costs add up: [layer, level of qk, level of vo, tokens].
    attention = tables["qk"][:, :, None] + tables["vo"][:, None]
    whole = float(getattr(before, quantity))
    inside = sum(
        getattr(layer.parts[part], quantity)
        for layer in before.layers
        for parts in COST_PARTS.values()
        for part in parts
    )
    stages = np.zeros((space.depth, tokens + 1))
    prefix = tokens - space.patches
    if space.reducer is not None and quantity == "macs":
        for count in range(prefix + 2, tokens + 1):
            # The table has no axis for the number of kept patches: it holds the cost of pruning one.
            stages[:, count] = space.reducer.predictor_macs(_shape(space), count - prefix, max(count - prefix - 1, 1))
    return CostTable(quantity, whole, whole - inside, attention, tables["mlp"], stages, prefix, space.patches)


def _shape(space: Space) -> Shape:
    return replace(space.shape, directions=max((*family_of(space.model).attention(space.model)[0].spec.ranks, 1)))


def _by_level(space: Space, before: ModelCosts, axis: str, quantity: str, steps: np.ndarray) -> np.ndarray:
    """Returns [layer, level, tokens]."""
    table = np.empty((space.depth, len(space.levels), len(steps)))
    # Levels that are not available are never chosen; they hold the original's costs, so that no entry is undefined.
    allowed = (0, *space.available(axis))
    for level in range(len(space.levels)):
        piece = space.piece(axis, level) if level in allowed and level else None
        costs = before if piece is None else prescribed_costs(space.model, piece)
        for index, layer in enumerate(costs.layers):
            table[index, level] = _over_tokens(layer, COST_PARTS[axis], quantity, steps)
    return table


def _over_tokens(layer: LayerCosts, parts: Sequence[str], quantity: str, steps: np.ndarray) -> np.ndarray:
    if quantity == "params":  # pruned tokens remove no weights
        return np.full(len(steps), float(sum(layer.parts[part].params for part in parts)))
    line = sum(layer.parts[part].macs for part in parts if part not in SQUARE)
    square = sum(layer.parts[part].macs for part in parts if part in SQUARE)
    return line * steps + square * steps**2
