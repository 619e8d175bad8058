"""Finds the optimal plan for a budget, assuming that the effects of single choices (their sensitivities) add up.

A stage is a point between two layers at which tokens are pruned or merged.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attnrx.decide.planning.cost_table import CostTable
from attnrx.decide.planning.sensitivity import Sensitivities
from attnrx.decide.planning.space import RANKS, TOKENS, Choices, Space
from attnrx.nouns.effort import AXIS_WORDS
from attnrx.support.errors import NotSupported

# Savings and sensitivities below NOTHING are rounding errors. The greedy gain also divides by at least NOTHING.
NOTHING = 1e-12
# Savings are rounded to 1 / GRID of the unchanged model's cost. A stage has a cost, so savings may be negative, down to
# -MAX_DEFICIT parts of 1 / GRID. To make up for the rounding, plans that miss the target by up to ROUNDING_SLACK parts
# are checked, too.
GRID, MAX_DEFICIT, ROUNDING_SLACK = 2000, 200, 10
# `few_stages` considers plans with one to FEW stages. Their numbers of tokens are multiples of TILE, which fill the
# vectors and tiles of kernels. At most NUMBERS different numbers are considered.
FEW, TILE, NUMBERS = 3, 16, 16


@dataclass(frozen=True)
class Step:
    """One plan, its cost as a share of the original model's cost, and its predicted divergence."""

    choices: Choices
    cost: float
    sensitivity: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """Finds, for any cost, the plan with the least predicted divergence.

    The search is a multiple-choice knapsack problem, solved by dynamic programming over the layers. The state after a
    layer consists of the number of pruned patches and the savings so far, because the costs and sensitivities of later
    layers depend on nothing else. If the number of stages is limited (`Space.most_stages`), the state also counts the
    stages so far. For every state, the plan with the lowest sensitivity is kept. The only approximation is that savings
    are rounded to 1 / `GRID` of the unchanged model's cost.
    """

    space: Space
    cost_table: CostTable
    sensitivities: Sensitivities

    def at(self, limit: float) -> Step:
        """Returns the plan with the least predicted divergence whose cost share is at most `limit`.

        Raises:
            NotSupported: According to the cost table, no plan is cheap enough.
        """
        # Plans are sorted by rounded savings, but checked by exact costs. Up to the rounding, the first plan that is
        # cheap enough is optimal. Then savings beyond the budget are undone.
        for choices in self._by_sensitivity(1 - limit / self.nothing):
            if self.cost_table.total(choices) <= limit:
                return self._without_surplus(limit, self._step(choices))
        raise _out_of_reach(self.space, self.cost_table.quantity, limit, self.cheapest)

    def near(self, limit: float, start: Choices) -> Step:
        """Returns a plan within the budget near `start`, found by greedy moves.

        Each step makes the move that saves most per added divergence. A move lowers one rank (of qk, vo or MLP) in one
        layer, or prunes more patches before a layer (`Space.moves`). Finally, choices that the budget does not require
        are undone.

        Raises:
            NotSupported: The moves reach no plan that is cheap enough.
        """
        # The method is the greedy rule for fractional knapsacks. Unlike the plan from `at`, its result depends on the
        # start.
        now = self._step(start)
        while now.cost > limit:
            best, gain = None, 0.0
            for step in map(self._step, self.space.moves(now.choices)):
                saved, added = now.cost - step.cost, step.sensitivity - now.sensitivity  # `added` may be 0 or below
                if saved > NOTHING and saved / max(added, NOTHING) > gain:
                    best, gain = step, saved / max(added, NOTHING)
            if best is None:
                raise NotSupported(
                    f"no plan near this one reaches {limit:g} of the original's {self.cost_table.quantity}."
                )
            now = best
        return self._without_surplus(limit, now)

    def few_stages(self, limit: float, count: int) -> tuple[Choices, ...]:
        """Returns plans within the budget that only prune tokens, in one to FEW stages.

        For every set of layers before which tokens may be pruned, the best numbers of tokens are found. For every
        number of stages, the plans of the `count` sets with the lowest predicted divergence are returned. `limit` is
        the largest allowed cost, as a share of the original's.
        """
        # Costs and sensitivities add up over the stages. A stage's contribution depends only on the numbers of tokens
        # before and after it, so all plans can be compared at once.
        table, space, found = self.cost_table, self.space, list[Choices]()
        if TOKENS not in space.axes:
            return ()
        tokens = np.arange(table.prefix + table.patches + 1)
        gone = np.minimum(tokens[::-1], table.patches)
        blocks = table.attention[:, 0, 0] + table.mlp[:, 0]
        # [layer, tokens]: the cost of this layer and all later ones, and the divergence from pruning before this layer.
        costs = blocks[::-1].cumsum(0)[::-1] / table.whole
        pruned = self.sensitivities.of_pruned
        changes = np.array([[pruned(layer, int(count)) for count in gone] for layer in range(space.depth)])
        unit = TILE * -(-table.patches // (TILE * NUMBERS)) if table.patches >= 8 * TILE else space.step
        numbers = range((tokens[-1] - 1) // unit * unit, table.prefix, -unit)
        for stages in range(1, min(FEW, space.most_stages or FEW, space.depth - 1) + 1):
            layers = np.array([*itertools.combinations(range(1, space.depth), stages)])[:, None]  # [sets, 1, stages]
            after = np.array([*itertools.combinations(numbers, stages)]).reshape(-1, stages)  # [numbers, stages]
            before = np.column_stack([np.full(len(after), tokens[-1]), after[:, :-1]])
            possible = (before - after <= space.at_once(before - table.prefix)).all(1)
            before, after = before[possible], after[possible]
            total = costs[layers, after] - costs[layers, before] + table.stages[layers, before] / table.whole
            changed = (changes[layers, after] - changes[layers, before]).sum(-1)  # [sets, numbers]
            changed[self.nothing + total.sum(-1) > limit] = np.inf
            if not changed.size:
                continue
            for index in changed.min(1).argsort()[:count]:
                best = changed[index].argmin()
                if np.isfinite(changed[index, best]):
                    num_pruned = np.zeros(space.depth, dtype=int)
                    num_pruned[layers[index, 0]] = before[best] - after[best]
                    found.append(replace(Choices.nothing(space.depth), num_pruned=tuple(num_pruned.tolist())))
        return tuple(found)

    def _step(self, choices: Choices) -> Step:
        return Step(choices, self.cost_table.total(choices), self.sensitivities.total(choices))

    def _without_surplus(self, limit: float, now: Step) -> Step:
        """Undoes choices that the budget does not require, so that the outputs diverge less, and returns the plan."""
        # Each round makes the change that lowers the divergence most. The divergence falls in every round, so the loop
        # ends. The loop is needed after rounding and greedy moves, because the last move may save too much. Latency
        # rises in steps, so keeping some more patches may cost nothing.
        step = 1 if self.cost_table.quantity == "latency" else None
        while True:
            best = now
            for choices in self.space.relaxations(now.choices, step):
                cost = self.cost_table.total(choices)
                if cost <= limit and (divergence := self.sensitivities.total(choices)) < best.sensitivity:
                    best = Step(choices, cost, divergence)
            if best is now:
                return now
            now = best

    @property
    def reachable(self) -> float:
        """The smallest cost share for which `at` finds a plan, with a margin for rounding."""
        return self.cheapest + self.nothing * ROUNDING_SLACK / GRID

    @property
    def cheapest(self) -> float:
        """The smallest cost share that any plan has, up to rounding."""
        # These are the largest savings that any final state reaches.
        saved = np.flatnonzero(np.isfinite(self._solved[0].min(0))).max() - MAX_DEFICIT
        return self.nothing * (1 - float(saved) / GRID)

    @cached_property
    def nothing(self) -> float:
        """The unchanged model's cost share. For latency, a share of 1 is the model's latency in its own library."""
        return self.cost_table.total(Choices.nothing(self.space.depth))

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The possible total numbers of pruned patches."""
        # Only the offset plus multiples of the step are possible, which keeps the number of states small.
        space = self.space
        most = space.patches if TOKENS in space.axes else 1
        return np.array([0, *range(space.offset or space.step, most, space.step)])

    @cached_property
    def _gone(self) -> np.ndarray:
        """The number of pruned patches in every search state.

        Without a limit on stages, every possible number occurs once. With a limit, every number above 0 occurs once for
        each number of stages.
        """
        return np.concatenate([self._numbers[:1], *([self._numbers[1:]] * (self.space.most_stages or 1))])

    def _after_stage(self, before: int, largest: int) -> slice:
        """Returns the states that one more stage can reach from state `before`, up to `largest` pruned patches."""
        pruned, each = self._gone[before], len(self._numbers) - 1
        stages = 0 if not before or self.space.most_stages is None else (before - 1) // each + 1
        if stages == self.space.most_stages:
            return slice(0)
        first, last = (int(np.searchsorted(self._numbers, number, side="right")) for number in (pruned, largest))
        return slice(stages * each + first, stages * each + last)

    @cached_property
    def _solved(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]]:
        """Returns the lowest sensitivities after all layers, and the backpointers of every layer.

        The sensitivities are indexed by the number of pruned patches (gone) and by the saved cost. In the second axis,
        index MAX_DEFICIT means no savings.
        """
        # [gone, saved]. Infinity marks a state that no plan reaches. Before the first layer, only one state is reached,
        # in which nothing is pruned or saved.
        least = np.full((len(self._gone), MAX_DEFICIT + GRID + 1), np.inf)
        least[0, MAX_DEFICIT] = 0.0
        backpointers = []
        for layer in range(self.space.depth):
            # The stage comes first, as in a forward pass, because a layer's cost depends on the remaining tokens.
            least, previous = self._prune_patches(layer, least)
            least, chosen, options = self._choose_ranks(layer, least)
            backpointers.append((previous, chosen, options))
        return least, backpointers

    def _prune_patches(self, layer: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Considers a stage before a layer. Returns the lowest sensitivity [gone, saved] and the previous states."""
        previous = np.tile(np.arange(len(least), dtype=np.int32)[:, None], least.shape[1])  # no stage: the same state
        # A stage needs the attention of a previous layer.
        if not layer or len(least) == 1:
            return least, previous
        updated, patches = least.copy(), self.space.patches
        # The divergence at every total number of pruned patches. As in `Sensitivities.total`, a stage adds the
        # difference between two totals.
        at_totals = np.array([self.sensitivities.of_pruned(layer, int(gone)) for gone in self._gone])
        for before, gone in enumerate(self._gone):
            largest = gone + self.space.at_once(int(patches - gone))
            # Python loops only over the totals before the stage. The totals after it are computed as one array.
            after = self._after_stage(before, largest)
            # [saved]: the cost of the stage shifts the savings down.
            shifted = _shifted(least[before], self._saved_by_stage(layer, before))
            candidate = shifted + (at_totals[after] - at_totals[before])[:, None]
            # `after` is a slice, so `updated[after]` is a view, and the masked assignments change `updated`.
            better = candidate < updated[after]
            updated[after][better] = candidate[better]
            previous[after][better] = before
        return updated, previous

    def _choose_ranks(self, layer: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Chooses a layer's ranks. Returns the lowest sensitivity [gone, saved], the chosen option, and all options."""
        updated, chosen, options = np.empty_like(least), np.empty(least.shape, dtype=np.int32), []
        by_number = {int(gone): self._options(layer, int(gone)) for gone in self._numbers}
        for index, gone in enumerate(self._gone):
            saved, sensitivity, levels = by_number[int(gone)]
            # [options, saved]: the sensitivity before the layer, shifted by the savings of every option.
            candidates = np.stack([_shifted(least[index], int(parts)) for parts in saved]) + sensitivity[:, None]
            chosen[index] = candidates.argmin(0)
            updated[index] = candidates.min(0)
            options.append(np.column_stack([saved, levels]))
        return updated, chosen, options

    def _options(self, layer: int, gone: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns a layer's Pareto-optimal rank choices: savings (in units of 1 / GRID), sensitivities and levels."""
        # Dominated options are removed to shorten the loop in `_choose_ranks`. An option stays only if it saves more
        # than every option with a lower sensitivity.
        levels, sensitivity = self._levels, np.zeros(len(self._levels))
        for axis, level in zip(RANKS, levels.T, strict=True):
            sensitivity += self.sensitivities.ranks[axis][layer, level]
        tokens = self.cost_table.prefix + self.cost_table.patches
        # Savings are relative to the layer with all patches, so they include what pruned patches save.
        full = self.cost_table.layer(Choices.nothing(self.space.depth), layer, 0)
        scores, values, mlp = levels.T
        costs = (
            self.cost_table.attention[layer, scores, values, tokens - gone]
            + self.cost_table.mlp[layer, mlp, tokens - gone]
        )
        saved = np.array([self._parts(float(cost)) for cost in full - costs])
        order = np.lexsort((-saved, sensitivity))  # by increasing sensitivity, then by decreasing savings
        # The first option has no predecessor, so it is compared with savings below those of any layer.
        optimal = saved[order] > np.maximum.accumulate(np.concatenate([[-MAX_DEFICIT - GRID], saved[order][:-1]]))
        return saved[order][optimal], sensitivity[order][optimal], levels[order][optimal]

    @cached_property
    def _levels(self) -> np.ndarray:
        """All combinations of levels for a layer, [options, axis]."""
        return np.array(list(itertools.product(*((0, *self.space.available(axis)) for axis in RANKS))))

    def _saved_by_stage(self, layer: int, before: int) -> int:
        """Returns what a stage saves, in units of 1 / GRID. This is negative, because the stage itself has a cost."""
        tokens = self.cost_table.prefix + self.space.patches - int(self._gone[before])
        return self._parts(-self.cost_table.stages[layer, tokens])

    def _parts(self, saved: float) -> int:
        # Savings are shares of the unchanged model's own cost, which may be higher than the original's.
        return round(saved / (self.cost_table.whole * self.nothing) * GRID)

    def _by_sensitivity(self, saved: float) -> Iterator[Choices]:
        """Yields plans that save at least the share `saved` of the unchanged model's cost, by rising sensitivity.

        Because savings are rounded, some of these plans save less, by up to ROUNDING_SLACK units of 1 / GRID.
        """
        # [gone, saved], flattened. All final states with enough savings compete, whatever their number of patches.
        first = MAX_DEFICIT + max(round(saved * GRID) - ROUNDING_SLACK, -MAX_DEFICIT)
        least = self._solved[0][:, first:]
        for index in least.argsort(None, kind="stable"):
            gone, over = divmod(int(index), least.shape[1])
            if not np.isfinite(least[gone, over]):  # in sorted order, so no plan reaches the remaining states either
                return
            yield self._traced(gone, first + over)

    def _traced(self, gone: int, saved: int) -> Choices:
        """Follows the backpointers from the final state [gone, saved] to the plan."""
        choices = Choices.nothing(self.space.depth)
        # Follows `_solved` in reverse order. In every layer, the ranks come first, then the stage before the layer.
        for layer, (previous, chosen, options) in reversed(list(enumerate(self._solved[1]))):
            parts, *levels = (int(value) for value in options[gone][chosen[gone, saved]])
            for axis, level in zip(RANKS, levels, strict=True):
                choices = choices.with_choice(axis, layer, level)
            saved -= parts
            before = int(previous[gone, saved])
            if before != gone:
                choices = choices.with_choice(TOKENS, layer, int(self._gone[gone] - self._gone[before]))
                saved -= self._saved_by_stage(layer, before)
            gone = before
        return choices


def require_reachable(space: Space, cost_table: CostTable, limit: float) -> float:
    """Returns a lower bound on the cost share of any plan. Raises NotSupported if the bound is above `limit`.

    The bound assumes the cheapest ranks in every layer. It also assumes that before every layer but the first, a stage
    prunes as many patches as possible at no cost. The check needs no sensitivities, so it can run before they are
    measured.
    """
    cheapest, gone = cost_table.outside, 0
    tokens = cost_table.prefix + cost_table.patches
    levels = {axis: [0, *space.available(axis)] for axis in RANKS}
    for layer in range(space.depth):
        if layer and TOKENS in space.axes:  # a stage needs the attention of a previous layer
            gone += space.at_once(cost_table.patches - gone)
        attention = cost_table.attention[layer, levels["qk"]][:, levels["vo"], tokens - gone]
        cheapest += float(attention.min() + cost_table.mlp[layer, levels["mlp"], tokens - gone].min())
    least = cheapest / cost_table.whole
    if least > limit:
        raise _out_of_reach(space, cost_table.quantity, limit, least)
    return least


def _out_of_reach(space: Space, quantity: str, limit: float, least: float) -> NotSupported:
    axes = ", ".join(AXIS_WORDS.get(axis, axis) for axis in space.axes)
    if quantity == "latency":
        problem = f"faster={1 / limit:.3g} is out of reach: plans over {axes} have at most {1 / least:.2f}x the speed"
        advice = "Request less, allow more axes, or measure on an idle machine."
    else:
        problem = f"{quantity}={limit:g} is out of reach: plans over {axes} keep at least {least:.3f} of the {quantity}"
        advice = "Request less, or allow more axes."
    return NotSupported(f"{problem}, by the cost table. {advice}")


def _shifted(least: np.ndarray, parts: int) -> np.ndarray:
    """Shifts the sensitivities [saved] by `parts` positions and fills the gap with infinity."""
    shifted = np.full_like(least, np.inf)
    shifted[max(parts, 0) : len(least) + min(parts, 0)] = least[max(-parts, 0) : len(least) - max(parts, 0)]
    return shifted
