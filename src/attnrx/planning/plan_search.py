"""Refining a plan against what is measured: a search for how much every damage should count.

Optuna finds how much each kind of damage counts, and how that changes over the layers; then the best plan is varied: a
few choices are changed at random, and the closed form meets the budget from there. Optuna keeps the trials of both.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from attnrx.errors import InvalidInput, NotSupported
from attnrx.optional import required_module
from attnrx.planning.allocation import Step, even_weights
from attnrx.planning.sensitivity import Weights
from attnrx.planning.space import AXES, TOKENS, Choices, Space

# This share of the trials, and so many at the least, looks everywhere; the others vary the best that is known, by so
# many choices at most. Of so many variations the one that should do least damage is tried; so many are made until as
# many are new.
BROAD, BROAD_LEAST, MOST_VARIED, VARIATIONS, ATTEMPTS = 1 / 3, 8, 3, 8, 40
# A search lets the damages of an axis count up to so many powers of two more than measured alone, or less; and so many
# for how that changes over the layers.
SPAN, TILT = 1.5, 1.0
KNOBS, CHOICES = "knobs", "choices"


@dataclass(frozen=True)
class Trial:
    """One plan that was made and measured: the knobs it came from, and the means over the images.

    A varied plan has the knobs of the one that it was varied from. A search goes by `softened` (see `Deviation`).
    """

    knobs: dict[str, float]
    step: Step
    divergence: float
    softened: float


@dataclass(frozen=True)
class Search:
    """How a plan is refined: so many trials in all, drawn from `seed`, the later ones near the best that is known.

    With a `storage`, a file or an address of Optuna, trials are kept there under a name that says what is sought:
    a search that was stopped goes on, and several machines that share it search together.
    """

    trials: int = 32
    seed: int = 0
    storage: str | None = None

    def __post_init__(self):
        if self.trials < 0:
            raise InvalidInput(f"{self.trials} trials: give 0, for the closed form alone, or more.")


def weights_of(space: Space, knobs: Mapping[str, float]) -> Weights:
    """Returns the weight of every damage: a power of two for its axis, which changes from the first layer to the
    last."""
    across = np.linspace(-0.5, 0.5, space.depth)
    found = even_weights(space.depth)
    for axis in AXES:
        found[axis] = 2.0 ** (knobs.get(axis, 0.0) + knobs.get(f"{axis}_tilt", 0.0) * across)
    return found


def knobs_of(space: Space) -> dict[str, float]:
    """Names what is searched, and how far from where the search begins: only what counts against another axis, and
    the tilts.
    """
    ranks = [axis for axis in space.axes if axis != TOKENS and space.available(axis)]
    first = next(iter(ranks), None) if TOKENS not in space.axes else None
    levels = {axis: SPAN for axis in ranks if axis != first}
    tilts = {f"{axis}_tilt": TILT for axis in space.axes if axis == TOKENS or axis in ranks}
    return {**levels, **tilts}


def varied(space: Space, choices: Choices, random: np.random.Generator) -> Choices:
    """Changes up to `MOST_VARIED` things: takes them back, or lets as many more go, to any level or number."""
    for _ in range(1 + int(random.integers(MOST_VARIED))):
        found = list((space.ways_back if random.integers(2) else space.moves)(choices))
        if found:
            choices = found[int(random.integers(len(found)))]
    return choices


@runtime_checkable
class Budget(Protocol):
    """Makes plans at one cost, and measures them."""

    def step(self, knobs: dict[str, float], start: Choices | None = None) -> Step:
        """Returns the plan at some knobs, on the way from the original or from another plan."""
        ...

    def tried(self, knobs: dict[str, float], step: Step) -> Trial:
        """Measures a plan, unless it was measured before."""
        ...


def refine_plan(space: Space, search: Search, requested: str, budget: Budget, first: Trial) -> tuple[Trial, ...]:
    """Makes and measures plans beside the first, and returns all as they came.

    The first third of them comes from knobs about those of the first, the others vary the best that is known.
    """
    if search.trials < 2:
        return (first,)
    optuna = required_module("optuna", "plan", "refining a plan (with trials above 0)")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=_address(search.storage),
        study_name=f"attnrx 5 {hashlib.sha256(requested.encode()).hexdigest()[:16]}",
        sampler=optuna.samplers.TPESampler(seed=search.seed, multivariate=True, n_startup_trials=8),
        load_if_exists=True,
    )
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(first.knobs)
    broad = max(BROAD_LEAST, round(BROAD * search.trials))
    proposals = _Proposals(space, budget, first, broad, search.seed)
    made = [first]

    def objective(trial: Any) -> float:
        knobs, step = proposals.next(trial)
        trial.set_user_attr(KNOBS, knobs)
        trial.set_user_attr(CHOICES, asdict(step.choices))
        made.append(budget.tried(knobs, step))
        return made[-1].softened

    done = sum(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))
    if done < search.trials:
        study.optimize(objective, n_trials=search.trials - done)
    knobs, choices = _known(study.best_trial)
    if all(choices != trial.step.choices for trial in made):  # found by a search before this one, or elsewhere
        made.append(budget.tried(knobs, budget.step(knobs, choices)))
    return tuple(made)


@dataclass(frozen=True)
class _Proposals:
    """Which plan to try next: so many at knobs drawn by Optuna, then ones that vary the best that is known."""

    space: Space
    budget: Budget
    start: Trial
    broad: int
    seed: int

    def next(self, trial: Any) -> tuple[dict[str, float], Step]:
        if trial.number >= self.broad:
            return self._near(trial)
        start = self.start.knobs
        spans = {name: (start[name] - span, start[name] + span) for name, span in knobs_of(self.space).items()}
        knobs = {name: trial.suggest_float(name, *span) for name, span in spans.items()}
        return knobs, self.budget.step(knobs)

    def _near(self, trial: Any) -> tuple[dict[str, float], Step]:
        random = np.random.default_rng((self.seed, trial.number))
        known = [each for each in trial.study.get_trials(deepcopy=False) if each.value is not None]
        seen = [self.start.step.choices, *(_known(each)[1] for each in known)]
        best = min(known, key=lambda each: each.value, default=None)
        knobs, choices = self.start.knobs, self.start.step.choices
        if best is not None and best.value < self.start.softened:
            knobs, choices = _known(best)
        steps: list[Step] = []
        for _ in range(ATTEMPTS):
            with suppress(NotSupported):  # what was taken back may be needed
                step = self.budget.step(knobs, varied(self.space, choices, random))
                steps += [step] * (step.choices not in seen)
            if len(steps) == VARIATIONS:
                break
        return knobs, min(steps, key=lambda step: step.sensitivity, default=self.budget.step(knobs, choices))


def _known(trial: Any) -> tuple[dict[str, float], Choices]:
    """Reads the knobs and the choices of a trial that Optuna keeps."""
    choices = {name: tuple(own) for name, own in trial.user_attrs[CHOICES].items()}
    return trial.user_attrs[KNOBS], Choices(**choices)


def _address(storage: str | None) -> str | None:
    return storage if storage is None or "://" in storage else f"sqlite:///{storage}"
