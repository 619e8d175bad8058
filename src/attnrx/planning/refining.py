"""Refining a plan against what is measured: Optuna searches how much each kind of damage should count."""

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

# Damages of one axis count up to 2**RANGE times as much as measured alone, or as little; over the layers they tilt.
RANGE, TILT = 4.0, 2.0


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
    """Gives the weight of every damage: a power of two for its axis, which changes from the first layer to the last."""
    across = np.linspace(-0.5, 0.5, space.depth)
    found = even_weights(space.depth)
    for axis in AXES:
        found[axis] = 2.0 ** (knobs.get(axis, 0.0) + knobs.get(f"{axis}_tilt", 0.0) * across)
    return found


def knobs_of(space: Space) -> dict[str, tuple[float, float]]:
    """Names what is searched, with its range: only what counts against another axis, and the tilts."""
    ranks = [axis for axis in space.axes if axis != TOKENS and space.available(axis)]
    first = next(iter(ranks), None) if TOKENS not in space.axes else None
    levels = {axis: (-RANGE, RANGE) for axis in ranks if axis != first}
    tilts = {f"{axis}_tilt": (-TILT, TILT) for axis in space.axes if axis == TOKENS or axis in ranks}
    return {**levels, **tilts}


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
        study_name=f"attnrx {hashlib.sha256(asked.encode()).hexdigest()[:16]}",
        sampler=optuna.samplers.TPESampler(seed=search.seed, multivariate=True, n_startup_trials=8),
        load_if_exists=True,
    )
    if not study.trials:
        study.enqueue_trial(first)
    ranges = knobs_of(space)
    known = {json.dumps(first, sort_keys=True): made[0]}

    def objective(trial: Any) -> float:
        knobs = {name: trial.suggest_float(name, *span) for name, span in ranges.items()}
        key = json.dumps(knobs, sort_keys=True)
        if key not in known:
            known[key] = measure(knobs)
            made.append(known[key])
        return known[key].divergence

    done = sum(trial.state.is_finished() for trial in study.trials)
    if done < search.trials:
        study.optimize(objective, n_trials=search.trials - done)
    best = json.dumps(study.best_params, sort_keys=True)
    if best not in known:  # found by a search before this one
        made.append(measure(study.best_params))
    return tuple(made)


def _address(storage: str | None) -> str | None:
    return storage if storage is None or "://" in storage else f"sqlite:///{storage}"
