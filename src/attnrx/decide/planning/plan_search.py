"""Refinement of a plan by measured divergence: a search over the weights of the sensitivities.

A weight of the sensitivities per axis, and its slope over the layers, are drawn at random. Then the best plan is
varied: a few choices are changed at random, and a greedy closed form meets the budget from there. Optuna stores the
trials, if they are stored; which plans are tried does not depend on it.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from attnrx.decide.planning.allocation import Step, even_weights
from attnrx.decide.planning.plan_settings import PlanSettings
from attnrx.decide.planning.sensitivity import Weights
from attnrx.decide.planning.space import AXES, TOKENS, Choices, Space
from attnrx.support.atomic_writes import process_runs
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.optional import required_module
from attnrx.support.progress import track
from attnrx.support.validation import require_regular

# The first trials start from at most EVEN even schedules of pruned patches. Then come a share (BROAD) of the others,
# at least BROAD_LEAST, with sampled knobs; the rest vary the best plan by at most MOST_VARIED choices. Of several
# new variations (`PlanSettings.variations`), from at most ATTEMPTS, the one with the lowest predicted divergence is
# measured.
EVEN, BROAD, BROAD_LEAST, MOST_VARIED, ATTEMPTS = 6, 1 / 4, 3, 3, 40
# The search range of the knobs, in powers of two: of the weight of an axis, and of its change over the layers.
SPAN, TILT = 1.5, 1.0
KNOBS, CHOICES, MEASURED = "knobs", "choices", "measured"
OWNER = "owner"  # the host and the process of a trial


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


@runtime_checkable
class PlanBuilder(Protocol):
    """Builds plans at one cost, and measures them."""

    def step(self, knobs: dict[str, float], start: Choices | None = None) -> Step:
        """Returns the plan for the knobs, optimal or reached greedily from the plan `start`."""
        ...

    def tried(self, knobs: dict[str, float], step: Step, best: Trial | None = None) -> Trial:
        """Measures a plan, one that is far worse than the best known one on fewer images; results are cached."""
        ...


def refine_plan(
    space: Space, settings: PlanSettings, requested: str, builder: PlanBuilder, first: Trial
) -> tuple[Trial, ...]:
    """Builds and measures further plans, and returns all trials in order, `first` included (see `Proposals`).

    Raises:
        InvalidInput: The storage of trials cannot be opened.
        CheckpointError: A stored trial was edited or is damaged.
    """
    if settings.trials < 2:
        return (first,)
    # The search is over knobs first, because a few weights correct what the sum of sensitivities misses (interactions
    # of axes and of depth) in all layers at once; single choices are varied at the end.
    # The number is increased with every change of the search, so that trials of an earlier version are not resumed.
    study = open_study(settings.storage, f"attnrx 9 {hashlib.sha256(requested.encode()).hexdigest()[:16]}")
    even = space.even_schedules()[:EVEN]
    broad = max(BROAD_LEAST, round(BROAD * (settings.trials - len(even))))
    proposals = Proposals(space, builder, first, even, broad, settings)

    def measure(trial: Any) -> float:
        trial.set_user_attr(OWNER, [platform.node(), os.getpid()])
        knobs, step = proposals.next(trial)
        trial.set_user_attr(KNOBS, knobs)
        trial.set_user_attr(CHOICES, asdict(step.choices))
        finished = [_trial_of(past) for past in trial.study.get_trials(deepcopy=False) if past.value is not None]
        measured = builder.tried(knobs, step, min((first, *finished), key=lambda known: known.softened))
        values = {"cost": step.cost, "sensitivity": step.sensitivity, "divergence": measured.divergence}
        trial.set_user_attr(MEASURED, values)
        return measured.softened

    # A resumed study has trials of an earlier run, or of another machine.
    if settings.storage is not None:
        _require_readable(study, space, settings.storage)
        _fail_abandoned(study)
    num_measured = sum(trial.value is not None for trial in study.get_trials(deepcopy=False))
    if num_measured < settings.trials:
        for _ in track(range(settings.trials - num_measured), "searching plans"):
            trial = study.ask()
            try:
                study.tell(trial, measure(trial))
            except BaseException:
                if settings.storage is not None:
                    _fail_abandoned(study)
                raise
    # All trials of the study, so that a resumed search has the finalists of one without interruption.
    return first, *(_trial_of(past) for past in study.get_trials(deepcopy=False) if past.value is not None)


@dataclass
class _MemoryTrial:
    study: "MemoryStudy"
    number: int
    value: float | None = None
    user_attrs: dict[str, Any] = field(default_factory=dict)
    state: Any = field(default_factory=lambda: SimpleNamespace(name="RUNNING"))

    def set_user_attr(self, name: str, value: Any) -> None:
        self.user_attrs[name] = value


class MemoryStudy:
    """The part of an Optuna study that the search uses, for trials that are not stored."""

    def __init__(self):
        self._trials: list[_MemoryTrial] = []

    def ask(self) -> _MemoryTrial:
        self._trials.append(_MemoryTrial(self, len(self._trials)))
        return self._trials[-1]

    def tell(self, trial: _MemoryTrial, value: float) -> None:
        trial.value = value

    def get_trials(self, deepcopy: bool = False) -> list[_MemoryTrial]:
        return self._trials


def open_study(storage: str | None, name: str) -> Any:
    """Returns the study of this name in the storage, with the trials that it has.

    Raises:
        InvalidInput: The storage cannot be opened.
        NotSupported: Optuna, which stores the trials, is not installed.
    """
    if storage is None:
        return MemoryStudy()
    optuna = required_module("optuna", "plan", "storing the trials of a plan")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sqlalchemy = required_module("sqlalchemy", "plan", "storing the trials of a plan")
    address = storage
    if "://" not in storage:
        address = f"sqlite:///{storage}"
        if Path(storage).exists():
            require_regular(storage)  # SQLite would wait for a pipe
    try:
        return optuna.create_study(storage=address, study_name=name, load_if_exists=True)
    # ImportError: the driver of the database is missing. RuntimeError: its tables are those of another version.
    except (sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError) as error:
        cause = str(error).partition("\n")[0]
        raise InvalidInput(
            f"storage={storage!r} cannot be opened as a storage of trials ({cause}); give another, or omit it."
        ) from error


def _require_readable(study: Any, space: Space, storage: str | None) -> None:
    """Raises CheckpointError if a stored trial was damaged or edited."""
    problem = f"{storage} holds trials of a search that cannot be read"
    sqlalchemy = required_module("sqlalchemy", "plan", "storing the trials of a plan")
    try:
        for trial in study.get_trials(deepcopy=False):
            host, process = trial.user_attrs.get(OWNER, ("", 0))
            valid = isinstance(host, str) and isinstance(process, int)
            if valid and trial.value is not None:
                stored = _trial_of(trial)
                choices = asdict(stored.step.choices).values()
                valid = all(len(part) == space.depth and all(isinstance(one, int) for one in part) for part in choices)
                numbers = [stored.step.cost, stored.step.sensitivity, stored.divergence, *stored.knobs.values()]
                valid = valid and all(isinstance(number, float | int) for number in numbers)
            if not valid:
                raise CheckpointError(f"{problem}: trial {trial.number} was edited. Delete it; it is made again.")
    except (sqlalchemy.exc.SQLAlchemyError, KeyError, TypeError, ValueError, AttributeError) as error:
        cause = str(error).partition("\n")[0]
        raise CheckpointError(f"{problem} ({cause}). Delete it; it is made again.") from error


def _fail_abandoned(study: Any) -> None:
    """Marks the running trials as failed whose process on this machine has ended."""
    for trial in study.get_trials(deepcopy=False):
        host, process = trial.user_attrs.get(OWNER, (None, None))
        # In a new container a process may have the id of the one that ended.
        ended = host == platform.node() and (process == os.getpid() or not process_runs(process))
        if ended and not trial.state.is_finished():
            with suppress(ValueError):  # another process was faster
                study.tell(trial.number, state=type(trial.state).FAIL)


def _num_valid(study: Any, before: int | None = None) -> int:
    """Returns the number of trials that did not fail, those with numbers below `before`, by default all."""
    trials = study.get_trials(deepcopy=False)[:before]
    return sum(trial.state.name != "FAIL" for trial in trials)


@dataclass(frozen=True)
class Proposals:
    """Proposes the next plan: from every `even` schedule, then for `broad` trials with random knobs, then
    variations of the best plan.
    """

    space: Space
    builder: PlanBuilder
    start: Trial
    even: tuple[Choices, ...]
    broad: int
    settings: PlanSettings

    def next(self, trial: Any) -> tuple[dict[str, float], Step]:
        start = self.start.knobs
        # By the number of the trial, which is unique in the study: machines that share it divide the proposals. Those
        # of interrupted trials are made again.
        number = _num_valid(trial.study, trial.number)
        if number < len(self.even):
            with suppress(NotSupported):  # nothing near this schedule is cheap enough
                return start, self.builder.step(start, self.even[number])
            return start, self.start.step
        # A generator per proposal: a resumed search draws the same as one without interruption.
        random = np.random.default_rng((self.settings.seed, number))
        if number >= len(self.even) + self.broad:
            return self._near(trial, random)
        ranges = search_ranges(self.space).items()
        knobs = {name: start[name] + float(random.uniform(-span, span)) for name, span in ranges}
        return knobs, self.builder.step(knobs)

    def _near(self, trial: Any, random: np.random.Generator) -> tuple[dict[str, float], Step]:
        finished = [past for past in trial.study.get_trials(deepcopy=False) if past.value is not None]
        measured = [self.start.step.choices, *(_known(past)[1] for past in finished)]
        best = min(finished, key=lambda past: past.value, default=None)
        # The plan of the closed form is no trial of the study, and may be the best.
        knobs, choices = self.start.knobs, self.start.step.choices
        if best is not None and best.value < self.start.softened:
            knobs, choices = _known(best)
        steps: list[Step] = []
        for _ in range(ATTEMPTS):
            with suppress(NotSupported):  # the varied plan may not reach the budget
                step = self.builder.step(knobs, varied(self.space, choices, random))
                steps += [step] * (step.choices not in measured)  # a plan is measured once
            if len(steps) == self.settings.variations:
                break
        if not steps:
            return knobs, self.builder.step(knobs, choices)
        return knobs, min(steps, key=lambda step: step.sensitivity)


def _known(trial: Any) -> tuple[dict[str, float], Choices]:
    """Returns the knobs and the choices of a stored trial."""
    choices = {name: tuple(value) for name, value in trial.user_attrs[CHOICES].items()}
    return trial.user_attrs[KNOBS], Choices(**choices)


def _trial_of(stored: Any) -> Trial:
    (knobs, choices), measured = _known(stored), stored.user_attrs[MEASURED]
    step = Step(choices, measured["cost"], measured["sensitivity"])
    return Trial(knobs, step, measured["divergence"], stored.value)
