"""Refining a plan against what is measured: a search for how much every damage should count.

Optuna finds how much each kind of damage counts, and how that changes over the layers; then the best plan is varied: a
few choices are changed at random, and the closed form meets the budget from there. Optuna keeps the trials of both.
"""

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from attnrx.errors import InvalidInput, NotSupported
from attnrx.planning.allocating import STAGES, Step, even_weights
from attnrx.planning.damages import Weights
from attnrx.planning.space import AXES, TOKENS, Choices, Space

# This share of the trials, and so many at the least, looks everywhere; the others vary the best that is known, by so
# many choices at most, and so often until a plan is new.
BROAD, BROAD_LEAST, MOST_VARIED, ATTEMPTS = 1 / 3, 8, 2, 20
# Damages of one axis count up to 2**RANGE times as much as measured alone, or as little; over the layers they tilt.
RANGE, TILT = 4.0, 2.0
# A stage at which tokens leave seems up to 2**DEARER times as dear as it is, or as cheap.
DEARER = 2.0
KNOBS, CHOICES = "knobs", "choices"


@dataclass(frozen=True)
class Trial:
    """One plan that was made and measured: the knobs it came from, and the mean divergence on the images.

    A varied plan has the knobs of the one that it was varied from.
    """

    knobs: dict[str, float]
    step: Step
    divergence: float


@dataclass(frozen=True)
class Search:
    """How a plan is refined: so many trials in all, drawn from `seed`.

    With a `storage`, a file or an address of Optuna, trials are kept there under a name that says what is sought:
    a search that was stopped goes on, and several machines that share it search together.
    """

    trials: int = 32
    seed: int = 0
    storage: str | None = None

    def __post_init__(self):
        if self.trials < 0:
            raise InvalidInput(f"{self.trials} trials: give 0, for the closed form alone, or more.")


def weights_of(space: Space, knobs: dict[str, float]) -> Weights:
    """Gives the weight of every damage: a power of two for its axis, which changes from the first layer to the last."""
    across = np.linspace(-0.5, 0.5, space.depth)
    found = even_weights(space.depth)
    for axis in AXES:
        found[axis] = 2.0 ** (knobs.get(axis, 0.0) + knobs.get(f"{axis}_tilt", 0.0) * across)
    found[STAGES] = np.full(1, 2.0 ** knobs.get(STAGES, 0.0))
    return found


def knobs_of(space: Space) -> dict[str, tuple[float, float]]:
    """Names what is searched, with its range: only what counts against another axis, the tilts, and how dear a stage
    at which tokens leave is to seem.
    """
    ranks = [axis for axis in space.axes if axis != TOKENS and space.available(axis)]
    first = next(iter(ranks), None) if TOKENS not in space.axes else None
    levels = {axis: (-RANGE, RANGE) for axis in ranks if axis != first}
    tilts = {f"{axis}_tilt": (-TILT, TILT) for axis in space.axes if axis == TOKENS or axis in ranks}
    return {**levels, **tilts, **({STAGES: (-DEARER, DEARER)} if TOKENS in space.axes else {})}


def varied(space: Space, choices: Choices, random: np.random.Generator) -> Choices:
    """Takes up to `MOST_VARIED` things back, or lets as many more go: any levels and any numbers of patches."""
    ways = space.ways_back if random.integers(2) else space.moves
    for _ in range(1 + int(random.integers(MOST_VARIED))):
        found = list(ways(choices))
        if found:
            choices = found[int(random.integers(len(found)))]
    return choices


@runtime_checkable
class Budget(Protocol):
    """Makes plans at one cost, and measures them."""

    def step(self, knobs: dict[str, float], start: Choices | None = None) -> Step:
        """Gives the plan at some knobs, on the way from the original or from another plan."""
        ...

    def tried(self, knobs: dict[str, float], step: Step) -> Trial:
        """Measures a plan, unless it was measured before."""
        ...


def refine_plan(space: Space, search: Search, asked: str, budget: Budget, first: dict[str, float]) -> tuple[Trial, ...]:
    """Makes and measures plans, the first at the given knobs, and gives them as they came."""
    made = [budget.tried(first, budget.step(first))]
    if search.trials < 2:
        return tuple(made)
    try:
        import optuna
    except ImportError as error:
        raise InvalidInput(
            "refining a plan takes Optuna: pip install 'attnrx[search]', or ask for no trials (0)."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=_address(search.storage),
        study_name=f"attnrx 2 {hashlib.sha256(asked.encode()).hexdigest()[:16]}",
        sampler=optuna.samplers.TPESampler(seed=search.seed, multivariate=True, n_startup_trials=8),
        load_if_exists=True,
    )
    if not study.trials:
        study.enqueue_trial(first)

    def objective(trial: Any) -> float:
        knobs, step = _proposed(space, search, budget, trial)
        trial.set_user_attr(KNOBS, knobs)
        trial.set_user_attr(CHOICES, asdict(step.choices))
        made.append(budget.tried(knobs, step))
        return made[-1].divergence

    done = sum(trial.state.is_finished() for trial in study.trials)
    if done < search.trials:
        study.optimize(objective, n_trials=search.trials - done)
    knobs, choices = _known(study.best_trial)
    if all(choices != trial.step.choices for trial in made):  # found by a search before this one, or elsewhere
        made.append(budget.tried(knobs, budget.step(knobs, choices)))
    return tuple(made)


def _proposed(space: Space, search: Search, budget: Budget, trial: Any) -> tuple[dict[str, float], Step]:
    """Gives the plan to try: at knobs drawn by Optuna at first, then varied from the best that is known."""
    if trial.number < max(BROAD_LEAST, round(BROAD * search.trials)):
        knobs = {name: trial.suggest_float(name, *span) for name, span in knobs_of(space).items()}
        return knobs, budget.step(knobs)
    random = np.random.default_rng((search.seed, trial.number))
    knobs, best = _known(trial.study.best_trial)
    seen = [_known(each)[1] for each in trial.study.trials if CHOICES in each.user_attrs]
    for _ in range(ATTEMPTS):
        with suppress(NotSupported):  # what was taken back may be needed
            step = budget.step(knobs, varied(space, best, random))
            if step.choices not in seen:
                return knobs, step
    return knobs, budget.step(knobs, best)


def _known(trial: Any) -> tuple[dict[str, float], Choices]:
    """Reads the knobs and the choices of a trial that Optuna keeps."""
    choices = {name: tuple(own) for name, own in trial.user_attrs[CHOICES].items()}
    return trial.user_attrs[KNOBS], Choices(**choices)


def _address(storage: str | None) -> str | None:
    return storage if storage is None or "://" in storage else f"sqlite:///{storage}"
