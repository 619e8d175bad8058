"""Refinement of a plan by measured divergence: plans that prune patches at even or few stages, then variations of the
best plan.

A few choices of the best plan are changed at random, and greedy moves meet the budget from there. The next plan depends
on the trials before it alone.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from attnrx.decide.planning.allocation import Step
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.space import Choices, Space
from attnrx.support.errors import NotSupported
from attnrx.support.progress import track

# The first trials start from at most EVEN even schedules of pruned patches; others vary the best plan by at most
# MOST_VARIED choices. Of several new variations (`PlanSettings.variations`), from at most ATTEMPTS, the one with the
# lowest predicted divergence is measured.
EVEN, MOST_VARIED, ATTEMPTS = 6, 3, 40


@dataclass(frozen=True)
class Trial:
    """One measured plan, and the means over the images; the search minimizes `softened` (see `Deviation`)."""

    step: Step
    divergence: float
    softened: float


BY_SOFTENED = attrgetter("softened")  # the key by which trials are compared


def varied(space: Space, choices: Choices, random: np.random.Generator) -> Choices:
    """Applies up to `MOST_VARIED` random changes: each keeps more or prunes more of one layer, or moves a stage."""
    for _ in range(1 + int(random.integers(MOST_VARIED))):
        # Both directions: what the change costs or saves is balanced by the greedy rule, which meets the budget again.
        variations = list((space.relaxations, space.moves, space.shifts)[random.integers(3)](choices))
        if variations:
            choices = variations[int(random.integers(len(variations)))]
    return choices


Build = Callable[[Choices | None], Step]
"""A plan to start from -> the plan at one cost: the optimal one, or one that is reached greedily from the start."""


def refine_plan(
    space: Space,
    settings: PlanSettings,
    build: Build,
    measure: Callable[[Step, Trial | None], Trial],
    first: Trial,
    few: Sequence[Choices] = (),
) -> tuple[Trial, ...]:
    """Builds and measures further plans, and returns all trials in order, `first` included (see `proposed`).

    `measure` gets the best known trial too: a plan that is far worse is measured on fewer images. Plans of `few` stages
    are measured beside the trials of the settings.
    """
    trials, number = [first], settings.trials + len(few) if settings.trials > 1 else 0
    starts = (*few, *space.even_schedules()[:EVEN]) if number else ()
    for _ in track(range(number), "searching plans"):
        step = proposed(space, settings, build, trials, starts)
        trials.append(measure(step, min(trials, key=BY_SOFTENED)))
    return tuple(trials)


def proposed(
    space: Space, settings: PlanSettings, build: Build, trials: Sequence[Trial], starts: Sequence[Choices] = ()
) -> Step:
    """Returns the plan to measure after these trials, the first of which is that of the closed form: from every one of
    the `starts`, then variations of the best plan.
    """
    number = len(trials) - 1
    if number < len(starts):
        with suppress(NotSupported):  # nothing near this schedule is cheap enough
            return build(starts[number])
        return trials[0].step
    random = np.random.default_rng((settings.seed, number))
    # The plan of the closed form may be the best.
    measured, best = {trial.step.choices for trial in trials}, min(trials, key=BY_SOFTENED).step.choices
    steps: list[Step] = []
    for _ in range(ATTEMPTS):
        with suppress(NotSupported):  # the varied plan may not reach the budget
            step = build(varied(space, best, random))
            steps += [step] * (step.choices not in measured)  # a plan is measured once
        if len(steps) == settings.variations:
            break
    return min(steps, key=lambda step: step.sensitivity) if steps else build(best)
