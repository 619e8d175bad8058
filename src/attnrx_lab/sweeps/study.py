"""A sweep as an Optuna study: every job is a trial that waits in the storage until a worker of any sweep takes it.

Optuna stores the trials (SQLite in a file, or any database that SQLAlchemy connects to), gives each to one worker, and
`optuna-dashboard` shows them. In addition, a job is identified by its words and never runs twice, and a trial whose
process has ended is queued again.
"""

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrx.errors import CheckpointError
from attnrx.optional import required_module
from attnrx.serialization.atomic_writes import process_runs
from attnrx_lab.sweeps.grid import Job, Result

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

NAME = "attnrx sweep"
STATES = ("waiting", "running", "done", "failed")
SQLITE_TIMEOUT = 60  # seconds for which a writer waits for another


@dataclass(frozen=True)
class JobState:
    """A job and its last attempt: its state (one of STATES), and its results or its error once it has ended."""

    job: Job
    state: str
    attempts: int
    seconds: float | None = None
    host: str | None = None
    error: str | None = None
    results: tuple[Result, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


class SweepStudy:
    """The jobs of a sweep in an Optuna storage, named by a file (SQLite) or a URL such as postgresql://...

    Raises:
        CheckpointError: The storage cannot be opened, or does not exist where `create` is false.
    """

    def __init__(self, place: Path | str, create: bool = True):
        optuna = required_module("optuna", "plan", "a sweep")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        self.is_url = "://" in str(place)
        self.place = str(place)
        if not self.is_url:
            _require_file(Path(place), create)
        self.study: Study = self._open(create)

    def _open(self, create: bool) -> "Study":
        url = self.place if self.is_url else f"sqlite:///{self.place}"
        try:
            known: dict[str, Any] = {} if self.is_url else {"connect_args": {"timeout": SQLITE_TIMEOUT}}
            storage = self._optuna.storages.RDBStorage(url, engine_kwargs=known)
            sampler = self._optuna.samplers.RandomSampler(seed=0)  # draws nothing: every trial was added with its job
            if not create:
                return self._optuna.load_study(study_name=NAME, storage=storage, sampler=sampler)
            return self._optuna.create_study(study_name=NAME, storage=storage, sampler=sampler, load_if_exists=True)
        except Exception as error:  # of SQLAlchemy, of the database's driver, or of Optuna
            raise CheckpointError(
                f"{self.place} cannot be used as the storage of a sweep ({str(error).partition(chr(10))[0]}); give a "
                "file that `attnrx sweep run` wrote, or a new one."
            ) from error

    @property
    def folder(self) -> Path:
        """The folder of the files of the jobs: next to a storage file, or in the working directory for a URL."""
        return Path("sweep.jobs") if self.is_url else Path(self.place).with_suffix(".jobs")

    def add(self, jobs: Iterable[Job]) -> int:
        """Adds the jobs that are not in the study yet and returns how many they are."""
        known = {state.job.id for state in self.states()}
        new = [job for job in jobs if job.id not in known]
        for job in new:
            self._enqueue(job, attempts=0)
        return len(new)

    def _enqueue(self, job: Job, attempts: int) -> None:
        attributes = {"words": list(job.words), "labels": dict(job.labels), "attempts": attempts}
        self.study.enqueue_trial({}, user_attrs=attributes)

    def take(self) -> "tuple[Trial, Job] | None":
        """Takes a waiting job; None if there is none."""
        if not self._trials("WAITING"):
            return None
        trial = self.study.ask()
        if "words" not in trial.user_attrs:  # another worker took the last one between the two calls
            self.study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
            return None
        trial.set_user_attr("owner", [platform.node(), os.getpid()])  # identifies the trial as abandoned later
        trial.set_user_attr("attempts", trial.user_attrs["attempts"] + 1)
        return trial, _job(trial)

    def finish(
        self, trial: "Trial", seconds: float, results: Iterable[Result], error: str | None, versions: dict[str, str]
    ) -> bool:
        """Stores the results of a trial, or its error; its value is its time in seconds.

        Returns False, and stores nothing, if the job was given to another worker in the meantime.
        """
        if self.study.get_trials(deepcopy=False)[trial.number].state.is_finished():
            return False
        trial.set_user_attr("seconds", seconds)
        trial.set_user_attr("versions", versions)
        trial.set_user_attr("results", [asdict(result) for result in results])
        if error is None:
            self.study.tell(trial, seconds)
        else:
            trial.set_user_attr("error", error)
            self.study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return True

    def requeue_abandoned(self) -> int:
        """Adds again the jobs whose process on this machine has ended without a result; returns their number."""
        return self._requeue([trial for trial in self._trials("RUNNING") if _is_abandoned(trial)])

    def requeue_own(self) -> int:
        """Adds again the jobs that this process has not finished; returns their number."""
        mine = [platform.node(), os.getpid()]
        return self._requeue([trial for trial in self._trials("RUNNING") if trial.user_attrs.get("owner") == mine])

    def requeue_failed(self) -> int:
        """Adds again the jobs whose last attempt failed; returns their number."""
        failed = [state for state in self.states() if state.state == "failed"]
        for state in failed:
            self._enqueue(state.job, state.attempts)
        return len(failed)

    def _requeue(self, trials: "Iterable[FrozenTrial]") -> int:
        count = 0
        for trial in trials:
            with suppress(ValueError):  # another process was faster
                self.study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
                self._enqueue(_job(trial), trial.user_attrs["attempts"])
                count += 1
        return count

    def states(self) -> tuple[JobState, ...]:
        """Returns every job with its last attempt, in the order in which the jobs were added."""
        last: dict[str, FrozenTrial] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if "words" in trial.user_attrs:
                last[_job(trial).id] = trial
        return tuple(map(_state, last.values()))

    def counts(self) -> dict[str, int]:
        found = [state.state for state in self.states()]
        return {state: found.count(state) for state in STATES}

    def results(self) -> tuple[Result, ...]:
        """Returns the numbers of all finished jobs; the labels of each are those of its job and its own."""
        return tuple(
            replace(result, labels={**state.job.labels, **result.labels})
            for state in self.states()
            if state.state == "done"
            for result in state.results
        )

    def _trials(self, state: str) -> "list[FrozenTrial]":
        wanted = (self._optuna.trial.TrialState[state],)
        return [trial for trial in self.study.get_trials(deepcopy=False, states=wanted) if "words" in trial.user_attrs]


def _require_file(path: Path, create: bool) -> None:
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file; a sweep is stored in an SQLite file.")
    if not path.exists() and not create:
        raise CheckpointError(f"{path} does not exist; `attnrx sweep run FILE --store {path}` makes it.")
    if not path.parent.is_dir():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot create the folder {path.parent}: {error.strerror or error}.") from error


def _is_abandoned(trial: "FrozenTrial") -> bool:
    host, process = trial.user_attrs.get("owner", (None, None))
    return host == platform.node() and not process_runs(process)


def _job(trial: "Trial | FrozenTrial") -> Job:
    return Job(tuple(trial.user_attrs["words"]), trial.user_attrs["labels"])


def _state(trial: "FrozenTrial") -> JobState:
    known = trial.user_attrs
    names = {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "done"}
    return JobState(
        job=_job(trial),
        state=names.get(trial.state.name, "failed"),
        attempts=known["attempts"],
        seconds=known.get("seconds"),
        host=known.get("owner", (None, None))[0],
        error=known.get("error"),
        results=tuple(Result(**each) for each in known.get("results", ())),
        versions=known.get("versions", {}),
    )
