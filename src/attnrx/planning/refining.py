"""Refining a plan against what is measured: a search for how much every damage should count.

Optuna finds how much each kind of damage counts, and how that changes over the layers; then the best plan is varied,
a few layers at a time. Optuna keeps the trials of both.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrx.errors import InvalidInput
from attnrx.planning.allocating import Step, even_weights
from attnrx.planning.damages import Weights
from attnrx.planning.space import AXES, TOKENS, Space

# This share of the trials, and so many at the least, looks everywhere; the others vary the best that is known: damages
# in a few layers count more or less, by powers of two of this deviation.
BROAD, BROAD_LEAST, DEVIATION, MOST_VARIED = 1 / 3, 8, 1.5, 3
# Damages of one axis count up to 2**RANGE times as much as measured alone, or as little; over the layers they tilt.
RANGE, TILT = 4.0, 2.0
KNOBS = "knobs"


@dataclass(frozen=True)
class Trial:
    """One plan that was made and measured: the knobs it came from, and the mean divergence on the images."""

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
    """Gives the weight of every damage: a power of two for its axis, which changes from the first layer to the last,
    and by what single layers have of their own.
    """
    across = np.linspace(-0.5, 0.5, space.depth)
    found = even_weights(space.depth)
    for axis in AXES:
        own = np.array([knobs.get(_in_layer(axis, layer), 0.0) for layer in range(space.depth)])
        found[axis] = 2.0 ** (knobs.get(axis, 0.0) + knobs.get(f"{axis}_tilt", 0.0) * across + own)
    return found


def _in_layer(axis: str, layer: int) -> str:
    return f"{axis}_{layer + 1}"


def knobs_of(space: Space) -> dict[str, tuple[float, float]]:
    """Names what is searched, with its range: only what counts against another axis, and the tilts."""
    ranks = [axis for axis in space.axes if axis != TOKENS and space.available(axis)]
    first = next(iter(ranks), None) if TOKENS not in space.axes else None
    levels = {axis: (-RANGE, RANGE) for axis in ranks if axis != first}
    tilts = {f"{axis}_tilt": (-TILT, TILT) for axis in space.axes if axis == TOKENS or axis in ranks}
    return {**levels, **tilts}


def varied(space: Space, knobs: dict[str, float], random: np.random.Generator) -> dict[str, float]:
    """Lets damages in a few layers count more or less than they do by these knobs."""
    places = [
        _in_layer(axis, layer)
        for axis in space.axes
        for layer in range(1 if axis == TOKENS else 0, space.depth)
        if axis == TOKENS or space.available(axis)
    ]
    count = min(1 + int(random.integers(MOST_VARIED)), len(places))
    chosen = random.choice(places, count, replace=False)
    moved = {str(name): knobs.get(str(name), 0.0) + DEVIATION * float(random.standard_normal()) for name in chosen}
    return {**knobs, **moved}


def refine_plan(
    space: Space, search: Search, asked: str, measure: Callable[[dict[str, float]], Trial], first: dict[str, float]
) -> tuple[Trial, ...]:
    """Makes and measures plans, the first at the given knobs, and gives them as they came."""
    made = [measure(first)]
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
    known = {json.dumps(first, sort_keys=True): made[0]}

    def objective(trial: Any) -> float:
        knobs = _proposed(space, search, trial)
        trial.set_user_attr(KNOBS, knobs)
        key = json.dumps(knobs, sort_keys=True)
        if key not in known:
            known[key] = measure(knobs)
            made.append(known[key])
        return known[key].divergence

    done = sum(trial.state.is_finished() for trial in study.trials)
    if done < search.trials:
        study.optimize(objective, n_trials=search.trials - done)
    best = study.best_trial.user_attrs[KNOBS]
    if json.dumps(best, sort_keys=True) not in known:  # found by a search before this one
        made.append(measure(best))
    return tuple(made)


def _proposed(space: Space, search: Search, trial: Any) -> dict[str, float]:
    """Gives the knobs to try: drawn by Optuna at first, then varied from the best that is known."""
    if trial.number < max(BROAD_LEAST, round(BROAD * search.trials)):
        return {name: trial.suggest_float(name, *span) for name, span in knobs_of(space).items()}
    best = trial.study.best_trial.user_attrs[KNOBS]
    return varied(space, best, np.random.default_rng((search.seed, trial.number)))


def _address(storage: str | None) -> str | None:
    return storage if storage is None or "://" in storage else f"sqlite:///{storage}"
