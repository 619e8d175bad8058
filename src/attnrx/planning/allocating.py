"""Sharing a budget out: again and again whatever saves most for the damage it does, in closed form."""

from dataclasses import dataclass, replace

import numpy as np

from attnrx.errors import NotSupported
from attnrx.planning.damages import Damages, Weights
from attnrx.planning.prices import Prices
from attnrx.planning.space import AXES, Choices, Space

NOTHING = 1e-12
STAGES = "stages"


@dataclass(frozen=True)
class Step:
    """One plan on the way from the whole model to the cheapest: its price as a share, and the damage predicted."""

    choices: Choices
    price: float
    damage: float


def even_weights(depth: int) -> dict[str, np.ndarray]:
    """Counts every damage once."""
    return {axis: np.ones(depth) for axis in AXES}


def allocate(
    space: Space,
    prices: Prices,
    damages: Damages,
    most: float,
    weights: Weights | None = None,
    start: Choices | None = None,
) -> tuple[Step, ...]:
    """Gives the way from the original to the first plan that costs at most this share: the best next step every time.

    A step goes from what is chosen to any lower level of one layer, or lets a few more patches leave before it; the
    best one saves most per nat of damage (marginal gain per cost). The way may `start` at another plan. A weight of
    STAGES makes every stage at which tokens leave seem dearer, so that there are fewer and larger ones, or cheaper.

    Raises:
        NotSupported: The prices know no plan that is cheap enough: nothing is promised that they do not show.
    """
    weights = weights or even_weights(space.depth)
    seeming = replace(prices, stages=prices.stages * float(weights.get(STAGES, np.ones(1))[0]))
    now = start or Choices.nothing(space.depth)
    steps = [Step(now, prices.total(now), damages.total(now, weights))]
    while steps[-1].price > most:
        best, gain, before = None, 0.0, seeming.total(steps[-1].choices)
        for choices in space.moves(steps[-1].choices):
            damage = damages.total(choices, weights)
            saved, done = before - seeming.total(choices), damage - steps[-1].damage
            if saved > NOTHING and saved / max(done, NOTHING) > gain:
                best, gain = Step(choices, prices.total(choices), damage), saved / max(done, NOTHING)
        if best is None:
            raise NotSupported(
                f"no plan over {', '.join(space.axes)} comes to {most:g} of the original's {prices.of}: the cheapest "
                f"that the prices show is {steps[-1].price:.3f}. Ask for more, or allow more axes."
            )
        steps.append(best)
    return (*steps[:-1], _given_back(space, prices, damages, most, weights, steps[-1]))


def _given_back(space: Space, prices: Prices, damages: Damages, most: float, weights: Weights, last: Step) -> Step:
    """Gives back what the last step saved too much: again and again the choice that did most damage."""
    now = last
    while True:
        best = now
        for choices in space.ways_back(now.choices):
            price = prices.total(choices)
            if price <= most and (damage := damages.total(choices, weights)) < best.damage:
                best = Step(choices, price, damage)
        if best is now:
            return now
        now = best
