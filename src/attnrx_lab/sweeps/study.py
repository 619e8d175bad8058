"""A sweep as an Optuna study: every job is a trial that waits in the storage until a sweep takes it and runs it.

Optuna stores the trials (SQLite in a file, or any database that SQLAlchemy connects to), gives each to one sweep, and
`optuna-dashboard` shows them. Optuna's own heartbeats belong to `Study.optimize`, which runs objectives in threads;
here every job has a process, and a trial whose sweep has ended is queued again.
"""

import os
import platform
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrx.support.atomic_writes import process_runs
from attnrx.support.errors import AttnrxError, CheckpointError, NotSupported
from attnrx.support.optional import required_module
from attnrx.support.progress import Log
from attnrx.support.subprocess_runner import FORKS, ProcessEnded, Subprocess
from attnrx.support.validation import (
    Field,
    Integer,
    Items,
    Optional,
    Record,
    Text,
    require_regular,
    validated,
)
from attnrx_lab.sweeps.jobs import OUT, Job, Words
from attnrx_lab.sweeps.summary import Result, of_job, rows_of

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

NAME = "attnrx sweep"  # of the study in its storage
STATES = {"WAITING": "waiting", "RUNNING": "running", "COMPLETE": "done", "FAIL": "failed"}
Work = Callable[[Words, int], dict[str, Any]]  # words and CPU threads -> a JSON-ready record; importable
Outcome = tuple[tuple[Result, ...], str | None]  # the numbers of a job, or its error


LABEL = Field("a text, a number, true, false or null", lambda value: isinstance(value, str | int | float | None))
VALUE = Optional(Field("a number", lambda value: type(value) in (int, float)))
NAMED = Field("an object", lambda value: isinstance(value, dict) and all(map(LABEL.allows, value.values())))
RESULT = Record(
    {"metric": Text(), "value": VALUE},
    {"low": VALUE, "high": VALUE, "n": Optional(Integer()), "unit": Text(), "labels": NAMED},
)
# The attributes of a trial, which anybody who can write to the storage can edit.
TRIAL = Record(
    {"words": Items(Text(), 1, 10_000), "labels": NAMED},
    {
        "owner": Field(
            "the name of a machine and a process",
            lambda value: isinstance(value, list) and list(map(type, value)) == [str, int],
        ),
        "results": Items(RESULT, 0, 10**6),
        "error": Optional(Text()),
    },
    open=True,
)


@dataclass(frozen=True)
class JobState:
    """A job and its last attempt: its state (a value of STATES), and its results or its error once it has ended."""

    job: Job
    state: str
    attempts: int
    seconds: float | None = None
    error: str | None = None
    results: tuple[Result, ...] = ()


class SweepStudy:
    """The jobs of a sweep in an Optuna storage, named by a file (SQLite) or a URL such as postgresql://...

    Raises:
        CheckpointError: The storage cannot be opened, or does not exist where `create` is false.
        CheckpointError: By every method, if the store is damaged.
    """

    def __init__(self, place: Path | str, create: bool = True):
        self._optuna: Any = required_module("optuna", "plan", "a sweep")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self.place = str(place)
        is_url = "://" in self.place
        # The files of the jobs: beside a storage file, or in the working directory for a URL.
        self.folder = Path("sweep.jobs" if is_url else Path(place).with_suffix(".jobs"))
        if not (is_url or create or Path(place).exists()):
            raise CheckpointError(f"{place} does not exist; `attnrx sweep run FILE --store {place}` makes it.")
        if not is_url and Path(place).exists():
            require_regular(place)  # SQLite would wait for a pipe
        try:
            if not is_url:
                Path(place).parent.mkdir(parents=True, exist_ok=True)
            # A writer of SQLite waits 60 seconds for another.
            options: Any = {} if is_url else {"connect_args": {"timeout": 60}}
            url = self.place if is_url else f"sqlite:///{place}"
            self._storage = self._optuna.storages.RDBStorage(url, engine_kwargs=options)
            if create:
                self._optuna.create_study(study_name=NAME, storage=self._storage, load_if_exists=True)
            self.study: Study = self._optuna.load_study(study_name=NAME, storage=self._storage)
        except Exception as error:  # of SQLAlchemy, of the database's driver, or of Optuna
            raise CheckpointError(
                f"{place} cannot be used as the storage of a sweep ({str(error).partition(chr(10))[0]}); give a file "
                "that `attnrx sweep run` wrote, or a new one."
            ) from error

    def add(self, jobs: Iterable[Job]) -> int:
        """Adds the jobs that are not in the study yet and returns how many they are."""
        stored_ids = {state.job.id for state in self.states()}
        new = [job for job in jobs if job.id not in stored_ids]
        for job in new:
            self._enqueue(job)
        return len(new)

    def _enqueue(self, job: Job) -> None:
        # No parameters: those of Optuna belong to a search space, and a job has words instead.
        self.study.enqueue_trial({}, user_attrs={"words": list(job.words), "labels": dict(job.labels)})

    def take(self, ids: Collection[str] | None = None) -> "tuple[Trial, Job] | None":
        """Takes a waiting job, one of these ids; None if there is none."""
        # Not `study.ask`, which takes any waiting job: those of other files are not the caller's.
        states = self._optuna.trial.TrialState
        study_id = self._storage.get_study_id_from_name(NAME)
        for waiting in self.trials((states.WAITING,)):
            job = _job(waiting)
            if ids is not None and job.id not in ids:
                continue
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, waiting.number)
            with suppress(RuntimeError):  # another sweep has finished it meanwhile
                if self._storage.set_trial_state_values(trial_id, state=states.RUNNING):
                    trial = self._optuna.trial.Trial(self.study, trial_id)
                    trial.set_user_attr("owner", [platform.node(), os.getpid()])  # identifies it as abandoned later
                    return trial, job
        return None

    def finish(self, trial: "Trial", results: Iterable[Result], error: str | None) -> None:
        """Stores the results of a trial, or its error."""
        trial.set_user_attr("results", [asdict(result) for result in results])
        trial.set_user_attr("error", error)
        state = self._optuna.trial.TrialState
        # A complete trial of Optuna has a value; the numbers are in its attributes.
        self.study.tell(trial, 0.0 if error is None else None, state=state.COMPLETE if error is None else state.FAIL)

    def requeue_abandoned(self, own: bool = False) -> None:
        """Adds the jobs again whose sweep on this machine has ended without a result; with `own`, those of this one."""
        running = self._optuna.trial.TrialState.RUNNING
        for trial in self.trials((running,)):
            host, process = trial.user_attrs.get("owner", (None, None))
            if host == platform.node() and (process == os.getpid() if own else not process_runs(process)):
                with suppress(ValueError):  # another sweep was faster
                    self.study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
                    self._enqueue(_job(trial))

    def requeue_failed(self, ids: Collection[str] | None = None) -> int:
        """Adds the jobs again whose last attempt failed, those of these ids; returns their number."""
        failed = [state.job for state in self.states(ids) if state.state == "failed"]
        for job in failed:
            self._enqueue(job)
        return len(failed)

    def states(self, ids: Collection[str] | None = None) -> tuple[JobState, ...]:
        """Returns every job, or those of these ids, with its last attempt, in the order in which they were added."""
        trials: dict[str, list[FrozenTrial]] = {}
        for trial in self.trials():
            job = _job(trial)
            if ids is None or job.id in ids:
                trials.setdefault(job.id, []).append(trial)
        return tuple(map(_state, trials.values()))

    def trials(self, states: Any = None) -> "list[FrozenTrial]":
        """Returns the trials of jobs, in these states of Optuna.

        Raises:
            CheckpointError: The storage is damaged, or was edited.
        """
        try:
            trials = self.study.get_trials(deepcopy=False, states=states)
        except Exception as error:  # of SQLAlchemy, of the database's driver, or of Optuna
            raise CheckpointError(
                f"{self.place} is damaged ({str(error).partition(chr(10))[0]}); put a copy in its place, or run the "
                "sweep with a new store."
            ) from error
        trials = [trial for trial in trials if "words" in trial.user_attrs]
        for trial in trials:
            validated(dict(trial.user_attrs), TRIAL, f"{self.place}, trial {trial.number}")
            if trial.state.name not in STATES:
                raise CheckpointError(f"{self.place}, trial {trial.number} is in the state {trial.state.name}.")
        return trials

    def counts(self, ids: Collection[str] | None = None) -> dict[str, int]:
        states_of_jobs = [state.state for state in self.states(ids)]
        return {state: states_of_jobs.count(state) for state in STATES.values()}

    def results(self) -> tuple[Result, ...]:
        """Returns the numbers of all finished jobs; the labels of each are those of its job and its own."""
        return tuple(of_job(result, state.job.labels) for state in self.states() for result in state.results)


def _job(trial: "Trial | FrozenTrial") -> Job:
    return Job(tuple(trial.user_attrs["words"]), trial.user_attrs["labels"])


def _state(trials: "list[FrozenTrial]") -> JobState:
    last = trials[-1]
    return JobState(
        _job(last),
        STATES[last.state.name],
        sum(trial.state.name != "WAITING" for trial in trials),
        None if last.duration is None else last.duration.total_seconds(),
        last.user_attrs.get("error"),
        tuple(Result(**each) for each in last.user_attrs.get("results", ())),
    )


def run_jobs(
    study: SweepStudy, work: Work, workers: int, threads: int, log: Log, ids: Collection[str] | None = None
) -> dict[str, int]:
    """Runs jobs until none waits, `workers` side by side with `threads` CPU threads each; returns their states.

    With `ids` it runs the jobs with these ids only: others in the storage may be commands of anybody.

    Every job has a new process, so a crash ends one job only; it is stored with its error and the others continue.
    After an interruption the running jobs wait again; if the sweep is killed, their processes end by themselves.
    """
    study.requeue_abandoned()
    idle: list[Subprocess] = []
    running: dict[Future[Outcome], tuple[Subprocess, Trial, Job]] = {}
    # The threads wait for processes; everything else is done by this one.
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(running) < workers and (taken := study.take(ids)):
                    folder = (study.folder / taken[1].id).resolve()
                    folder.mkdir(parents=True, exist_ok=True)
                    words = tuple(word.replace(f"{{{OUT}}}", str(folder)) for word in taken[1].words)
                    process = idle.pop() if idle else Subprocess(keeps_memory=False)
                    call = pool.submit(process.call, _run_job, work, words, threads, str(folder / "log.txt"))
                    running[call] = process, *taken
                if not running:
                    return study.counts(ids)
                for call in wait(running, return_when=FIRST_COMPLETED).done:
                    process, trial, job = running.pop(call)
                    results, error = _outcome_of(call)
                    # Without forks the jobs of a process would share its state.
                    if FORKS and call.exception() is None:
                        idle.append(process)
                    else:
                        process.close()
                    study.finish(trial, results, error)
                    counts = study.counts(ids)
                    ended = f"done, {len(results)} numbers" if error is None else f"FAILED: {error}"
                    log(f"{counts['done'] + counts['failed']} of {sum(counts.values())}: {job.title}: {ended}")
        finally:
            for process in (*idle, *(process for process, _, _ in running.values())):
                process.close()
            study.requeue_abandoned(own=True)


def _outcome_of(call: "Future[Outcome]") -> Outcome:
    try:
        return call.result()
    except ProcessEnded as error:
        return (), f"the process of the job {error.how}; its output is in log.txt of its folder."
    except NotSupported as error:
        return (), str(error)


def _run_job(work: Work, words: Words, threads: int, log: str) -> Outcome:
    with _output_to(log):
        try:
            return rows_of(work(words, threads)), None
        except Exception as error:
            traceback.print_exc()
            return (), str(error) if isinstance(error, AttnrxError) else f"{type(error).__name__}: {error}"


@contextmanager
def _output_to(path: str) -> Iterator[None]:
    """Appends the output of this process to a file, also that of libraries, which write to the descriptors."""
    kept = [os.dup(number) for number in (1, 2)]
    with open(path, "ab") as file:  # noqa: PTH123 - for its descriptor
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for stream, number, copy in zip((sys.stdout, sys.stderr), (1, 2), kept, strict=True):
                stream.flush()
                os.dup2(copy, number)
                os.close(copy)
