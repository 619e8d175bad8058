"""Cost tables hold the cost of every layer by rank and number of tokens, computed in closed form or measured."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from attnrx.change.realization import compressed_spec, realize
from attnrx.decide.planning.space import RANKS, TOKENS, Choices, Space
from attnrx.nouns.prescription import Prescription
from attnrx.vit.costs import ModelCosts
from attnrx.vit.maps import COST_PARTS, LINEAR_MAPS
from attnrx.vit.models import family_of, hidden_units, rank_of, require_all_tokens
from attnrx.vit.spec import compression_of
from attnrx.vit.tokens import TokenPolicy

# If layers merge the tokens of their own windows, their costs are evaluated at SAMPLES numbers of tokens.
SAMPLES = 33
# The parts of a layer's cost that grow quadratically with the number of tokens.
SQUARE = ("scores", "fusion", "read_out")
# A table is implausible if a compressed block costs more than ABOVE times the whole block. It may cost more than the
# whole block. In one case, a block of a small model ran as one kernel call. After a merging stage, its parts were
# called separately, which took seven times as long.
ABOVE = 10.0
LEAST = 1e-6  # smaller shares of the latency are rounding errors
# The least cost of a compressed block, as a part of its share of the multiply-accumulates. Smaller products are not
# more efficient, so a lower cost is noise.
PER_MAC = 0.5


def prescribed_costs(model: nn.Module, prescription: Prescription, by: str = "compress") -> ModelCosts:
    """Returns the costs that a model would have if a prescription (for qk, vo, MLP and tokens) were applied to it.

    `by` names a compression, as in `realize`.
    """
    require_all_tokens(model, "compute the costs of a prescription on")
    family, compression = family_of(model), compression_of(by)
    keeps_norms = compression is None or compression.keeps_norms
    # `specs` holds the layer specs after `realize`. `ranks` and `hidden` hold the sizes of the MLPs.
    pairs = zip(family.attention(model), prescription.layers, strict=True)
    specs = tuple(compressed_spec(attention.spec, layer, keeps_norms) for attention, layer in pairs)
    ranks = tuple(
        tuple(
            # A map without a decision keeps its rank and its cost. Such a map may already be factored.
            sum(layer.outputs[name].ranks) if name in layer.outputs else rank_of(linear)
            for name, linear in zip(LINEAR_MAPS, pair, strict=True)
        )
        # `strict` is off, because `mlp` returns no pairs if the MLPs are not pairs of linear maps.
        for pair, layer in zip(family.mlp(model), prescription.layers, strict=False)
    )
    hidden = tuple(
        units if layer.hidden is None else int(layer.hidden.keep.sum())
        for units, layer in zip(hidden_units(family.mlp(model)), prescription.layers, strict=False)
    )
    policy = None if prescription.tokens is None else prescription.tokens.policy
    costs = family.costs(model, specs, tuple((first, second) for first, second in ranks), policy, hidden)
    return replace(costs, layers=tuple(costs.layers[index] for index in prescription.kept_blocks))


@dataclass(frozen=True, eq=False)
class CostTable:
    """The cost of every layer, for every rank and every number of tokens.

    `quantity` is "latency" (in any unit of time), "macs" or "params". `whole` is the cost of the original model.
    `outside` is the cost of its parts outside the blocks.

    `attention` has the axes [layer, level of qk, level of vo, tokens], and `mlp` has [layer, level, tokens]. Level 0 is
    the full rank. The token axis has an entry for every number of tokens, from none to all. `stages` [layer, tokens] is
    the cost of a token reducer that runs before a layer and gets this number of tokens.

    `prefix` is the number of tokens before the patches, e.g. the class token, and `patches` is the number of patches.
    `spread` is the interquartile range of the timings divided by their median. Exact costs have a spread of 0.
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
        """Returns why the table's costs are implausible, or None if they are plausible.

        If other processes disturb the timings, costs of whole blocks may be negative, or costs may rise although less
        is computed.
        """
        numbers = (self.attention, self.mlp, self.stages, self.outside, self.whole)
        if not all(np.isfinite(each).all() for each in numbers):
            return "a cost is not finite"
        # `full` is the attention's cost with full ranks. `least` and `largest` are block costs over all levels.
        full = self.attention[:, 0, 0, -1]
        least = (self.attention + self.mlp.min(axis=1)[:, None, None]).min(axis=(1, 2, 3))
        largest = (self.attention + self.mlp.max(axis=1)[:, None, None]).max(axis=(1, 2, 3))
        share = (self.outside + full.sum() + self.mlp[:, 0, -1].sum()) / self.whole if self.whole > 0 else -1.0
        if min(self.whole, share) <= 0 or self.outside < 0 or (full + self.mlp[:, 0, -1] <= 0).any():
            return "the cost of the model, of a block or of what is outside the blocks is not positive"
        layers = full + self.mlp[:, 0, -1]
        if (least < -LEAST * layers).any():
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
        """Returns the cost of the whole model as a share of the original's cost."""
        layers = sum(self.layer(choices, index, gone) for index, gone in enumerate(choices.left))
        stages = sum(float(self.stages[layer, tokens]) for layer, tokens in self.stage_inputs(choices).items())
        return (self.outside + layers + stages) / self.whole

    def stage_inputs(self, choices: Choices) -> dict[int, int]:
        """Returns the number of tokens that enter each stage, keyed by the layer after the stage."""
        tokens = self.prefix + self.patches
        before = zip((0, *choices.left), choices.num_pruned, strict=False)
        return {layer: tokens - gone for layer, (gone, count) in enumerate(before) if count}


def exact_cost_table(space: Space, quantity: str) -> CostTable:
    """Returns the exact cost table for MACs or parameters, computed in closed form."""
    model = space.model
    before = family_of(model).costs(model)
    tokens = before.layers[0].tokens
    # Costs are linear or quadratic in the number of tokens, so one evaluation per level gives them for all numbers.
    left = _Left.of(space, before, tokens)
    tables = {axis: _by_level(space, before, axis, quantity, left) for axis in RANKS}
    # No part of the cost depends on both qk and vo, so their costs add up: [layer, level of qk, level of vo, tokens].
    attention = tables["qk"][:, :, None] + tables["vo"][:, None]
    whole = float(getattr(before, quantity))
    inside = float(attention[:, 0, 0, -1].sum() + tables["mlp"][:, 0, -1].sum())
    stages = np.zeros((space.depth, tokens + 1))
    prefix = tokens - space.patches
    if space.merges_in_layers and quantity == "macs":
        attention += _comparing_in_layers(space, tokens)[:, None, None]
    elif space.reducer is not None and quantity == "macs":
        shape = replace(space.shape, directions=max((*family_of(model).attention(model)[0].spec.ranks, 1)))
        for count in range(prefix + 2, tokens + 1):
            # The table has no axis for the number of kept patches, so every stage is assumed to prune one patch.
            stages[:, count] = space.reducer.predictor_macs(shape, count - prefix, max(count - prefix - 1, 1))
    return CostTable(quantity, whole, whole - inside, attention, tables["mlp"], stages, prefix, space.patches)


def _comparing_in_layers(space: Space, tokens: int) -> np.ndarray:
    """Returns the MACs for comparing tokens in layers that merge inside themselves, as a table [layer, tokens]."""
    table, reducer = np.zeros((space.depth, tokens + 1)), space.reducer
    assert reducer is not None
    for layer, lengths in enumerate(family_of(space.model).sequences(space.model)):
        for length, number in Counter(lengths).items():
            left = np.maximum(np.arange(tokens + 1) * length // tokens, 1)
            macs = {count: reducer.predictor_macs(space.shape, length, count) for count in set(left.tolist())}
            table[layer] += number * np.array([macs[count] for count in left.tolist()])
    table[:, -1] = 0.0  # nothing is merged
    return table


@dataclass(frozen=True, eq=False)
class _Left:
    """What remains of a layer's MACs for every number of tokens.

    If layers merge the tokens of their own windows, the windows round the number of tokens, and are padded. So `costs`
    contains the costs of all layers at the numbers of tokens in `counts`. For other models, both are empty.
    """

    tokens: int
    counts: tuple[int, ...]
    costs: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, space: Space, before: ModelCosts, tokens: int) -> "_Left":
        if not space.merges_in_layers:
            return cls(tokens, (), ())
        assert space.reducer is not None
        counts = tuple(sorted({*np.linspace(1, tokens, SAMPLES).round().astype(int).tolist()}))
        policies = [TokenPolicy(space.reducer, (2,), (count / tokens,)) for count in counts[:-1]]
        costs = [family_of(space.model).costs(space.model, tokens=policy).layers for policy in policies]
        return cls(tokens, counts, (*costs, before.layers))

    def shares(self, axis: str, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shares of an axis's MACs that remain, as two tables [layer, tokens].

        The first one is for MACs that grow linearly with the number of tokens, and the second one for MACs that grow
        quadratically.
        """
        steps = np.arange(self.tokens + 1) / self.tokens
        if not self.costs:
            return np.tile(steps, (depth, 1)), np.tile(steps**2, (depth, 1))
        shares = []
        for is_square in (False, True):
            names = [name for name in COST_PARTS[axis] if (name in SQUARE) == is_square]
            macs = np.array([[sum(each.parts[name].macs for name in names) for each in row] for row in self.costs])
            relative = macs / np.maximum(macs[-1], 1)  # [count, layer]
            at = [0, *self.counts]
            shares.append(np.stack([np.interp(steps * self.tokens, at, [0.0, *column]) for column in relative.T]))
        return shares[0], shares[1]


def _by_level(space: Space, before: ModelCosts, axis: str, quantity: str, left: _Left) -> np.ndarray:
    """Returns the costs of one axis (qk, vo or MLP), as a table [layer, level, tokens]."""
    table = np.empty((space.depth, len(space.levels), left.tokens + 1))
    linear, quadratic = left.shares(axis, space.depth)
    # Levels that are not available are never chosen. They get the original's costs, so every entry is defined.
    allowed = (0, *space.available(axis))
    for level in range(len(space.levels)):
        piece = space.piece(axis, level) if level in allowed and level else None
        costs = before if piece is None else prescribed_costs(space.model, piece)
        for index, layer in enumerate(costs.layers):
            parts = {name: layer.parts[name] for name in COST_PARTS[axis]}
            if quantity == "params":  # pruning tokens removes no weights
                table[index, level] = sum(part.params for part in parts.values())
                continue
            square = sum(part.macs for name, part in parts.items() if name in SQUARE)
            rest = sum(part.macs for part in parts.values()) - square
            table[index, level] = rest * linear[index] + square * quadratic[index]
    return table


# Models with these numbers of stages are timed to find the cost of a stage. None means one stage before every layer but
# the first. Only two files are timed, because each takes as long to write as all files of blocks together.
STAGES, STAGES_OF_FILES = (1, 3, None), (1, 3)
# The largest factor between an axis's savings in a whole model and in its timed blocks. Larger factors are cut to MOST,
# because timings of whole models are noisy.
MOST = 1.5
# The most that a whole model may save by fewer tokens in addition to its blocks, as a share. Timed blocks include the
# operations for token sizes.
MORE = 0.15
OWN, JOINT = "own", "qk+vo"


def corrected(
    cost_table: CostTable,
    space: Space,
    latency_shares: Callable[[Mapping[str, nn.Module]], Mapping[str, float]],
    axes: Collection[str] = RANKS,
    staged: Mapping[Choices, nn.Module] | None = None,
) -> CostTable:
    """Corrects a table of block costs by timing whole models. The new costs are shares of the baseline's latency.

    `latency_shares` times models in turns and returns each model's latency, by name, as a share of the baseline's
    latency. The following models are timed:

    - The unchanged model. Its latency sets the overall scale.
    - For every axis, a model with a middle level of this axis in all layers. Its latency sets a factor for the savings
      on this axis.
    - A model with a middle level of both qk and vo. Its latency sets a factor for the difference between their joint
      savings and the sum of their separate savings.
    - Models with token reduction (`staged`, by default the models of `staged_models`). Three numbers are fitted to
      their latencies by least squares. Two of them make up the cost of a stage: a constant, and a part proportional to
      the stage's number of input tokens. The third is a share of the savings that the table predicts for fewer tokens.
      A whole model does not achieve this share, e.g. because the weights of a block that is timed alone stay in the
      cache. If the whole model saves more than predicted, the share is negative.
    """
    # Timings of single blocks miss effects in whole models, such as weights that leave the cache. A few whole models
    # correct for them, one after the other: first the scale, then the axes, then the tokens.
    unchanged = Choices.nothing(space.depth)
    available = {axis: levels for axis in axes if (levels := space.available(axis))}
    ranks = {axis: space.uniform(axis, levels[len(levels) // 2]) for axis, levels in available.items()}
    staged = staged_models(space) if staged is None else staged
    some = {str(index): choices for index, choices in enumerate(staged)}
    pair = [ranks[axis] for axis in ("qk", "vo") if axis in ranks]
    joint = {JOINT: replace(pair[0], vo=pair[1].vo)} if len(pair) == 2 else {}
    if joint and abs(sum(map(cost_table.total, pair)) - sum(map(cost_table.total, (unchanged, joint[JOINT])))) < LEAST:
        joint = {}  # the table adds them up
    models = {name: realize(space.model, space.prescription(at)) for name, at in {**ranks, **joint}.items()}
    shares = latency_shares({OWN: space.model, **models, **dict(zip(some, staged.values(), strict=True))})
    # Total costs are divided by `whole`. Scaling it gives the unchanged model its measured share.
    cost_table = replace(cost_table, whole=cost_table.whole * cost_table.total(unchanged) / shares[OWN])
    # For every axis, the measured savings and the predicted savings.
    saved = {axis: (shares[OWN] - shares[axis], shares[OWN] - cost_table.total(at)) for axis, at in ranks.items()}
    factors = {axis: saving_factor(*both) for axis, both in saved.items()}
    for at in joint.values():
        # What both axes save together beyond their sum, as measured and as the table predicts it.
        of_axes = sum(factors[axis] * saved[axis][1] for axis in ("qk", "vo"))
        beyond = shares[OWN] - cost_table.total(at) - saved["qk"][1] - saved["vo"][1]
        factors[JOINT] = saving_factor(shares[OWN] - shares[JOINT] - of_axes, beyond)
    cost_table = with_savings(cost_table, factors)
    if not some:
        return cost_table
    tokens = space.shape.layout.tokens
    # For the timed models, measured minus predicted share = constant * stages + slope * input tokens of all stages +
    # missed * predicted savings. Non-negative least squares finds these three unknowns. All of them are costs, and
    # noise must not make costs negative. The constant is the time to call a stage's many operations. For one image, it
    # is most of the stage's cost.
    missing = np.array([shares[name] - cost_table.total(choices) for name, choices in some.items()])
    inputs = [cost_table.stage_inputs(choices).values() for choices in some.values()]
    stage_tokens = np.array([*map(sum, inputs)]) / cost_table.whole
    num_stages = np.array([*map(len, inputs)]) / cost_table.whole
    saved_by_tokens = np.array([shares[OWN] - cost_table.total(choices) for choices in some.values()])
    # Tokens are counted as shares of all tokens, so both parts of a stage's cost have the same unit. In a shallow
    # model, some plans coincide, and there may be fewer plans than unknowns. The constant is then left out.
    columns = np.stack([stage_tokens / tokens, saved_by_tokens, num_stages], axis=1)[:, : len(some)]
    # A whole model may also save more than its blocks. So the fitted share is missed + MORE, which is never negative.
    fit = nonnegative_fit(columns, missing + MORE * saved_by_tokens)
    slope, missed, constant = [*fit, *(0.0, MORE, 0.0)[len(fit) :]]
    missed -= MORE
    return replace(
        cost_table,
        attention=_less_saved(cost_table.attention, missed),
        mlp=_less_saved(cost_table.mlp, missed),
        stages=cost_table.stages + constant + slope * np.arange(tokens + 1) / tokens,
    )


def _less_saved(costs: np.ndarray, missed: float) -> np.ndarray:
    """Reduces the savings from fewer tokens by the share `missed`, in a table of costs [..., tokens]."""
    return costs + missed * (costs[..., -1:] - costs)  # the last entry is the cost at all tokens


def bounded(cost_table: CostTable, macs: CostTable) -> CostTable:
    """Returns the table with smaller savings wherever a block would cost less than PER_MAC times its share of the MACs.

    The table adds up the measured savings of attention and MLP, and timings on several threads are noisy. Without this
    bound, the cost of a compressed block could even be negative.

    First, the cost of the block at full rank is raised to the bound for every number of tokens. Then the savings by
    lower ranks and fewer hidden units are scaled down by one factor per layer and number of tokens, so that even the
    smallest block meets the bound.
    """
    full, work = (table.attention[:, 0, 0] + table.mlp[:, 0] for table in (cost_table, macs))  # [layer, tokens]
    share = np.divide(work, work[:, -1:], out=np.zeros_like(work), where=work[:, -1:] > 0)
    missing = np.maximum(PER_MAC * share * full[:, -1:] - full, 0.0)
    full = full + missing
    # [layer, tokens]: the multiply-accumulates of the smallest block, and what its time saves of the whole block's.
    smallest = macs.attention.min(axis=(1, 2)) + macs.mlp.min(axis=1)
    saved = cost_table.attention[:, 0, 0] - cost_table.attention.min(axis=(1, 2))
    saved = saved + cost_table.mlp[:, 0] - cost_table.mlp.min(axis=1)
    kept = np.divide(smallest, work, out=np.zeros_like(work), where=work > 0)
    factor = np.divide((1 - PER_MAC * kept) * full, saved, out=np.ones_like(full), where=saved > 0).clip(0.0, 1.0)
    none = cost_table.attention[:, :1, :1]
    attention = none + missing[:, None, None] + factor[:, None, None] * (cost_table.attention - none)
    return replace(
        cost_table,
        attention=attention,
        mlp=cost_table.mlp[:, :1] + factor[:, None] * (cost_table.mlp - cost_table.mlp[:, :1]),
    )


def saving_factor(measured: float, predicted: float) -> float:
    """Returns the measured saving as a multiple of the predicted saving, from 0 to MOST, or 1 if none is predicted."""
    # The ratio must not be negative, because noise must not turn a saving into a cost.
    return min(max(measured / predicted, 0.0), MOST) if predicted > LEAST else 1.0


def with_savings(cost_table: CostTable, factors: Mapping[str, float]) -> CostTable:
    """Scales the savings of every axis by its factor, and the interaction of qk and vo by the factor for JOINT."""
    attention, mlp = cost_table.attention, cost_table.mlp
    # [layer, level of qk, level of vo, tokens] = full cost + effect of qk + effect of vo + interaction.
    none = attention[:, :1, :1]
    by_qk, by_vo = attention[:, :, :1] - none, attention[:, :1] - none
    both = attention - none - by_qk - by_vo
    qk, vo, joint = (factors.get(name, 1.0) for name in ("qk", "vo", JOINT))
    return replace(
        cost_table,
        attention=none + qk * by_qk + vo * by_vo + joint * both,
        mlp=mlp[:, :1] + factors.get("mlp", 1.0) * (mlp - mlp[:, :1]),
    )


def staged_models(space: Space, stages: Sequence[int | None] = STAGES) -> dict[Choices, nn.Module]:
    """Returns models that prune half of the patches, in equal parts, at stages that are spread over the layers.

    There is one model for each number in `stages`. In a shallow model, some of them coincide.
    """
    models, none = dict[Choices, nn.Module](), Choices.nothing(space.depth)
    for layers in map(space.spread, stages if TOKENS in space.axes else ()):
        count = max(space.patches // (2 * len(layers)), 1)
        choices = replace(none, num_pruned=tuple(count * (layer in layers) for layer in range(space.depth)))
        if choices not in models:
            models[choices] = realize(space.model, space.prescription(choices))
    return models


def never_slower(
    times: np.ndarray, levels: Collection[int], others: Collection[int] = (), from_zero: bool = False
) -> np.ndarray:
    """Fits times [level, level of another axis, tokens] by least squares so that a lower rank is never slower.

    In the fit, the savings of both axes add up. A kernel may pad one axis to the size of the other. So there is a
    further saving for every level, which counts only once both axes have reached this level. Savings are subtracted
    from a common intercept or, with `from_zero`, from zero. Use `from_zero` if the times are differences from the time
    at full rank. The fit has fewer parameters than there are times, so it also reduces measurement noise.
    """
    # Every level of an axis has an indicator, which is 1 at this level and at all lower ones. The savings of an
    # indicator cannot be negative, so the fitted times cannot rise from one level to the next.
    pairs = [(one, other) for one in (0, *levels) for other in (0, *others)]
    axes = sorted(levels), sorted(others), sorted({*levels} & {*others})
    steps = np.array(
        [
            [float(reached >= level) for reached, axis in zip((*pair, min(pair)), axes, strict=True) for level in axis]
            for pair in pairs
        ]
    )
    fitted, at = times.copy(), tuple(zip(*pairs, strict=True))  # times[at] is [pairs, tokens]
    if steps.size:
        mean_step, mean_time = (0.0, 0.0) if from_zero else (steps.mean(0), times[at].mean(0))
        savings = [nonnegative_fit(steps - mean_step, column) for column in (mean_time - times[at]).T]
        fitted[at] = mean_time - (steps - mean_step) @ np.array(savings).T
    return fitted


def nonnegative_fit(factors: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the x >= 0 that minimizes ||factors x - target||, by the active-set method of Lawson and Hanson (1974).

    The squared error decreases in every step, so no set of positive entries occurs twice, and the loop ends.
    """
    found, positive = np.zeros(factors.shape[1]), np.zeros(factors.shape[1], dtype=bool)
    tolerance = 1e-10 * np.abs(factors.T @ target).max(initial=0.0)
    while True:
        gradient = np.where(positive, -np.inf, factors.T @ (target - factors @ found))
        if gradient.max(initial=-np.inf) <= tolerance:
            return found
        positive[gradient.argmax()] = True
        while True:
            free = np.zeros_like(found)
            free[positive] = np.linalg.lstsq(factors[:, positive], target, rcond=None)[0]
            blocked = positive & (free <= 0)
            if not blocked.any():
                break
            # All entries move toward the free solution, until the first of them reaches zero.
            found += (found[blocked] / (found[blocked] - free[blocked])).min() * (free - found)
            positive &= found > 1e-15
        found = free
