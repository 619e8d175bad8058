"""Refinement of a plan by measured divergence: a search over the weights of the sensitivities.

A weight of the sensitivities per axis, and its slope over the layers, are drawn at random. Then the best plan is
varied: a few choices are changed at random, and a greedy closed form meets the budget from there. The next plan
depends on the trials before it alone.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from attnrx.decide.planning.allocation import Step, even_weights
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.sensitivity import Weights
from attnrx.decide.planning.space import AXES, TOKENS, Choices, Space
from attnrx.support.errors import NotSupported
from attnrx.support.progress import track

# The first trials start from at most EVEN even schedules of pruned patches. Then come a share (BROAD) of the others,
# at least BROAD_LEAST, with sampled knobs; the rest vary the best plan by at most MOST_VARIED choices. Of several
# new variations (`PlanSettings.variations`), from at most ATTEMPTS, the one with the lowest predicted divergence is
# measured.
EVEN, BROAD, BROAD_LEAST, MOST_VARIED, ATTEMPTS = 6, 1 / 4, 3, 3, 40
# The search range of the knobs, in powers of two: of the weight of an axis, and of its change over the layers.
SPAN, TILT = 1.5, 1.0


@dataclass(frozen=True)
class Trial:
    """One measured plan, its knobs, and the means over the images.

    A varied plan has the knobs of the plan it varies. The search minimizes `softened` (see `Deviation`).
    """

    knobs: dict[str, float]
    step: Step
    divergence: float
    softened: float


def weights_of(space: Space, knobs: Mapping[str, float]) -> Weights:
    """Returns the weights [layer] of the sensitivities of every axis: powers of two, log-linear over the layers."""
    # Centred, so that a tilt changes no mean logarithm of the weights, which is the knob of the axis.
    across = np.linspace(-0.5, 0.5, space.depth)
    weights = even_weights(space.depth)
    for axis in AXES:
        weights[axis] = 2.0 ** (knobs.get(axis, 0.0) + knobs.get(f"{axis}_tilt", 0.0) * across)
    return weights


def search_ranges(space: Space) -> dict[str, float]:
    """Returns the names of the knobs and their search ranges, in powers of two: one weight per axis and the tilts.

    Only relative weights matter, so the first axis has no weight knob.
    """
    # Tokens have no weight knob; with them the weights of all rank axes are relative to theirs.
    ranks = [axis for axis in space.axes if axis != TOKENS and space.available(axis)]
    first = next(iter(ranks), None) if TOKENS not in space.axes else None
    levels = {axis: SPAN for axis in ranks if axis != first}
    tilts = {f"{axis}_tilt": TILT for axis in space.axes if axis == TOKENS or axis in ranks}
    return {**levels, **tilts}


def varied(space: Space, choices: Choices, random: np.random.Generator) -> Choices:
    """Applies up to `MOST_VARIED` random changes: each keeps more or prunes more of one layer."""
    for _ in range(1 + int(random.integers(MOST_VARIED))):
        # Both directions: what the change costs or saves is balanced by the greedy rule, which meets the budget again.
        variations = list((space.relaxations if random.integers(2) else space.moves)(choices))
        if variations:
            choices = variations[int(random.integers(len(variations)))]
    return choices


Build = Callable[[dict[str, float], Choices | None], Step]
"""Knobs, and a plan to start from -> the plan for the knobs at one cost, optimal or reached greedily from the start."""


def refine_plan(
    space: Space,
    settings: PlanSettings,
    build: Build,
    measure: Callable[[dict[str, float], Step, Trial | None], Trial],
    first: Trial,
) -> tuple[Trial, ...]:
    """Builds and measures further plans, and returns all trials in order, `first` included (see `proposed`).

    `measure` gets the best known trial too: a plan that is far worse is measured on fewer images.
    """
    trials = [first]
    even = space.even_schedules()[:EVEN] if settings.trials > 1 else ()
    for _ in track(range(settings.trials if settings.trials > 1 else 0), "searching plans"):
        knobs, step = proposed(space, settings, build, trials, even)
        trials.append(measure(knobs, step, min(trials, key=_softened)))
    return tuple(trials)


def _softened(trial: Trial) -> float:
    return trial.softened


def proposed(
    space: Space, settings: PlanSettings, build: Build, trials: Sequence[Trial], even: Sequence[Choices] = ()
) -> tuple[dict[str, float], Step]:
    """Returns the knobs and the plan to measure after these trials, the first of which is that of the closed form: from
    every `even` schedule, then with random knobs, then variations of the best plan.
    """
    # The search is over knobs first, because a few weights correct what the sum of sensitivities misses (interactions
    # of axes and of depth) in all layers at once; single choices are varied at the end.
    start, number = trials[0], len(trials) - 1
    if number < len(even):
        with suppress(NotSupported):  # nothing near this schedule is cheap enough
            return start.knobs, build(start.knobs, even[number])
        return start.knobs, start.step
    random = np.random.default_rng((settings.seed, number))
    if number < len(even) + max(BROAD_LEAST, round(BROAD * (settings.trials - len(even)))):
        ranges = search_ranges(space).items()
        knobs = {name: start.knobs[name] + float(random.uniform(-span, span)) for name, span in ranges}
        return knobs, build(knobs, None)
    # The plan of the closed form may be the best.
    measured, best = {trial.step.choices for trial in trials}, min(trials, key=_softened)
    steps: list[Step] = []
    for _ in range(ATTEMPTS):
        with suppress(NotSupported):  # the varied plan may not reach the budget
            step = build(best.knobs, varied(space, best.step.choices, random))
            steps += [step] * (step.choices not in measured)  # a plan is measured once
        if len(steps) == settings.variations:
            break
    if not steps:
        return best.knobs, build(best.knobs, best.step.choices)
    return best.knobs, min(steps, key=lambda step: step.sensitivity)
