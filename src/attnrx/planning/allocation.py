"""Sharing a budget out in closed form: the best of all plans, if what their choices do to the answers adds up."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnrx.errors import NotSupported
from attnrx.planning.cost_table import CostTable
from attnrx.planning.sensitivity import Sensitivities, Weights
from attnrx.planning.space import AXES, RANKS, TOKENS, Choices, Space

NOTHING = 1e-12
# What is saved is counted in so many parts of the whole, and rounded to them; before anything is saved so many may be
# owed, for a stage. So many parts less than what must be saved are looked at, too, since rounding may hide them.
PARTS, OWED, HIDDEN = 2000, 200, 10


@dataclass(frozen=True)
class Step:
    """One plan: its price as a share of the original's, and the damage predicted."""

    choices: Choices
    cost: float
    sensitivity: float


def even_weights(depth: int) -> dict[str, np.ndarray]:
    """Counts every damage once."""
    return {axis: np.ones(depth) for axis in AXES}


@dataclass(frozen=True, eq=False)
class Frontier:
    """The plans that should do least damage at every price, among all that there are.

    A multiple-choice knapsack, solved by dynamic programming over the layers. What is known after a layer is how many
    patches have left, and how much is saved: nothing else of a plan says what its later layers cost, or do to the
    answers. Of all plans that come to the same two numbers, the one that did least damage is kept. What is saved is
    rounded to `PARTS` of the whole, which is all that keeps a plan from being the best.
    """

    space: Space
    cost_table: CostTable
    sensitivities: Sensitivities
    weights: Weights

    def at(self, most: float) -> Step:
        """Returns the plan of least damage that costs at most this share.

        Raises:
            NotSupported: The prices know no plan that is cheap enough: nothing is promised that they do not show.
        """
        for choices in self._by_sensitivity(self.nothing - most):
            cost = self.cost_table.total(choices)
            if cost <= most:
                step = Step(choices, cost, self.sensitivities.total(choices, self.weights))
                return given_back(self.space, self.cost_table, self.sensitivities, most, self.weights, step)
        raise NotSupported(
            f"no plan over {', '.join(self.space.axes)} comes to {most:g} of the original's {self.cost_table.of}: the "
            f"cheapest that the prices show is {self.cheapest:.3f}. Ask for more, or allow more axes."
        )

    @property
    def cheapest(self) -> float:
        """The least share that any plan costs, as far as rounding tells."""
        saved = np.flatnonzero(np.isfinite(self._least.min(0))).max() - OWED
        return self.nothing - float(saved) / PARTS

    @cached_property
    def nothing(self) -> float:
        """What the model costs as it is: of a latency not quite 1, by our own attention."""
        return self.cost_table.total(Choices.nothing(self.space.depth))

    @cached_property
    def _gone(self) -> np.ndarray:
        """How many patches may have left."""
        return np.arange(0, self.space.patches if TOKENS in self.space.axes else 1, self.space.step)

    @property
    def _least(self) -> np.ndarray:
        return self._solved[0]

    @cached_property
    def _solved(self) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]]:
        """Returns the least damage [gone, saved] after all layers, and for every layer the way there.

        Place OWED of `saved` is nothing.
        """
        least = np.full((len(self._gone), OWED + PARTS + 1), np.inf)
        least[0, OWED] = 0.0
        way = []
        for layer in range(self.space.depth):
            least, came = self._left(layer, least)
            least, chosen, options = self._ranked(layer, least)
            way.append((came, chosen, options))
        return least, way

    def _left(self, layer: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lets patches leave before a layer: the least damage [gone, saved], and where of `gone` it came from."""
        came = np.tile(np.arange(len(least), dtype=np.int32)[:, None], least.shape[1])
        if not layer or len(least) == 1:
            return least, came
        found, patches = least.copy(), self.space.patches
        harm = np.array([self.sensitivities.of_pruning(layer, int(gone), patches) for gone in self._gone])
        harm = harm * self.weights[TOKENS][layer]
        for before, gone in enumerate(self._gone):
            most = gone + self.space.at_once(int(patches - gone))
            after = slice(before + 1, int(np.searchsorted(self._gone, most, side="right")))
            less = _moved(least[before], self._saved_by_stage(layer, before)) + (harm[after] - harm[before])[:, None]
            better = less < found[after]
            found[after][better] = less[better]
            came[after][better] = before
        return found, came

    def _ranked(self, layer: int, least: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Chooses the ranks of a layer: the least damage [gone, saved], which option it takes, and the options."""
        found, chosen, options = np.empty_like(least), np.empty(least.shape, dtype=np.int32), []
        for place, gone in enumerate(self._gone):
            saved, harm, levels = self._options(layer, int(gone))
            tried = np.stack([_moved(least[place], int(parts)) for parts in saved]) + harm[:, None]
            chosen[place] = tried.argmin(0)
            found[place] = tried.min(0)
            options.append(np.column_stack([saved, levels]))
        return found, chosen, options

    def _options(self, layer: int, gone: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what every choice of ranks saves, in parts, and does, and its levels; only those that are worth
        it."""
        levels, harm = self._levels, np.zeros(len(self._levels))
        for axis, level in zip(RANKS, levels.T, strict=True):
            harm += self.sensitivities.ranks[axis][layer, level] * self.weights[axis][layer]
        tokens = self.cost_table.prefix + self.cost_table.patches
        full = self.cost_table.layer(Choices.nothing(self.space.depth), layer, 0)
        scores, values, mlp = levels.T
        priced = (
            self.cost_table.attention[layer, scores, values, tokens - gone]
            + self.cost_table.mlp[layer, mlp, tokens - gone]
        )
        saved = np.array([self._parts(float(cost)) for cost in full - priced])
        order = np.lexsort((-saved, harm))  # those that do less first, and of equals the one that saves more
        worth = saved[order] > np.maximum.accumulate(np.concatenate([[-OWED - PARTS], saved[order][:-1]]))
        return saved[order][worth], harm[order][worth], levels[order][worth]

    @cached_property
    def _levels(self) -> np.ndarray:
        """Every choice of levels [options, axis] that a layer has."""
        return np.array(list(itertools.product(*((0, *self.space.available(axis)) for axis in RANKS))))

    def _saved_by_stage(self, layer: int, before: int) -> int:
        """Gives, in parts, what a stage saves in itself, never more than nothing."""
        seen = self.cost_table.prefix + self.space.patches - int(self._gone[before])
        return self._parts(-self.cost_table.stages[layer, seen])

    def _parts(self, saved: float) -> int:
        return round(saved / self.cost_table.whole * PARTS)

    def _by_sensitivity(self, saved: float) -> Iterator[Choices]:
        """Returns the plans that save as much, or so little less that rounding may hide it, the least damage first."""
        first = OWED + max(round(saved * PARTS) - HIDDEN, -OWED)
        least = self._least[:, first:]
        for place in least.argsort(None, kind="stable"):
            gone, over = divmod(int(place), least.shape[1])
            if not np.isfinite(least[gone, over]):
                return
            yield self._traced(gone, first + over)

    def _traced(self, gone: int, saved: int) -> Choices:
        """Follows the way back from how many patches have left at last, and what is saved."""
        choices = Choices.nothing(self.space.depth)
        for layer, (came, chosen, options) in reversed(list(enumerate(self._solved[1]))):
            parts, *levels = (int(own) for own in options[gone][chosen[gone, saved]])
            for axis, level in zip(RANKS, levels, strict=True):
                choices = choices.with_level(axis, layer, level)
            saved -= parts
            before = int(came[gone, saved])
            if before != gone:
                choices = choices.with_num_pruned(layer, int(self._gone[gone] - self._gone[before]))
                saved -= self._saved_by_stage(layer, before)
            gone = before
        return choices


def _moved(least: np.ndarray, parts: int) -> np.ndarray:
    """Returns the damages [saved] when so many parts more are saved, or fewer."""
    moved = np.full_like(least, np.inf)
    moved[max(parts, 0) : len(least) + min(parts, 0)] = least[max(-parts, 0) : len(least) - max(parts, 0)]
    return moved


def filled(
    space: Space, cost_table: CostTable, sensitivities: Sensitivities, most: float, weights: Weights, start: Choices
) -> Step:
    """Meets a budget from any plan: again and again whatever saves most for the damage it does (marginal gain per
    cost), then what was saved too much is given back.

    A step goes from what is chosen to any lower level of one layer, or lets a few more patches leave before it.

    Raises:
        NotSupported: No such way comes to a plan that is cheap enough.
    """
    now = Step(start, cost_table.total(start), sensitivities.total(start, weights))
    while now.cost > most:
        best, gain = None, 0.0
        for choices in space.moves(now.choices):
            cost, sensitivity = cost_table.total(choices), sensitivities.total(choices, weights)
            saved, done = now.cost - cost, sensitivity - now.sensitivity
            if saved > NOTHING and saved / max(done, NOTHING) > gain:
                best, gain = Step(choices, cost, sensitivity), saved / max(done, NOTHING)
        if best is None:
            raise NotSupported(f"no plan near this one comes to {most:g} of the original's {cost_table.of}.")
        now = best
    return given_back(space, cost_table, sensitivities, most, weights, now)


def given_back(
    space: Space, cost_table: CostTable, sensitivities: Sensitivities, most: float, weights: Weights, last: Step
) -> Step:
    """Returns back what was saved too much: again and again the choice that did most damage."""
    now = last
    while True:
        best = now
        for choices in space.ways_back(now.choices):
            cost = cost_table.total(choices)
            if cost <= most and (sensitivity := sensitivities.total(choices, weights)) < best.sensitivity:
                best = Step(choices, cost, sensitivity)
        if best is now:
            return now
        now = best
