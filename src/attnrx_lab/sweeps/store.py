"""The store of a sweep: a folder with one folder per job, which holds its record, its output and the files it writes.

A job is run under the lock of its folder, which the system releases when the process ends, however it ends. So several
sweeps share a store, also on several machines that share a disk, and a job without a result waits to be run again.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from attnrx.support.atomic_writes import file_lock
from attnrx.support.errors import AttnrxError, CheckpointError, NotSupported
from attnrx.support.progress import Log
from attnrx.support.storage import read_record, write_json
from attnrx.support.subprocess_runner import FORKS, ProcessEnded, Subprocess
from attnrx.support.validation import Choice, Field, Integer, Items, Number, Optional, Record, Text
from attnrx_lab.sweeps.jobs import OUT, Job, Words
from attnrx_lab.sweeps.summary import Result, of_job, rows_of

KIND, SCHEMA = "attnrx sweep job", 1
STATES = ("waiting", "running", "done", "failed")
Work = Callable[[Words, int], dict[str, Any]]  # words and CPU threads -> a JSON-ready record; importable
Outcome = tuple[tuple[Result, ...], str | None]  # the numbers of a job, or its error

LABEL = Field("a text, a number, true, false or null", lambda value: isinstance(value, str | int | float | None))
NAMED = Field("an object", lambda value: isinstance(value, dict) and all(map(LABEL.allows, value.values())))
RESULT = Record(
    {"metric": Text(), "value": Optional(Number())},
    {"low": Optional(Number()), "high": Optional(Number()), "n": Optional(Integer()), "unit": Text(), "labels": NAMED},
)
FIELDS = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Integer(),
        "number": Integer(),
        "words": Items(Text(), 1, 10_000),
        "labels": NAMED,
    },
    {"seconds": Optional(Number(0.0)), "results": Items(RESULT, 0, 10**6), "error": Optional(Text())},
)


@dataclass(frozen=True)
class JobState:
    """A job and its last attempt: its state, one of STATES, and its results or its error once it has ended.

    `number` is its place in the order in which the jobs were added.
    """

    job: Job
    number: int
    state: str = "waiting"
    seconds: float | None = None
    error: str | None = None
    results: tuple[Result, ...] = ()


class SweepStore:
    """The jobs of sweeps in a folder.

    Raises:
        CheckpointError: It is no folder, or has no jobs where `create` is false; by every method, if a record in it was
            edited or is damaged.
    """

    def __init__(self, folder: Path | str, create: bool = True):
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; name the folder of a sweep, or a new one.")
        if not create and not self._folders():
            raise CheckpointError(
                f"{folder} has no jobs of a sweep; `attnrx sweep run FILE --store {folder}` adds them."
            )

    def folder_of(self, job: Job) -> Path:
        return self.folder / job.id

    def add(self, jobs: Iterable[Job]) -> int:
        """Adds the jobs that are not in the store yet and returns how many they are."""
        known = {state.job.id for state in self.states()}
        new = {job.id: job for job in jobs if job.id not in known}
        for number, job in enumerate(new.values(), len(known)):
            self._write(JobState(job, number))
        return len(new)

    def state(self, job: Job) -> JobState:
        """Returns the state of a job of the store, as its record has it: running jobs still wait there."""
        return self._read(self.folder_of(job))

    def states(self) -> tuple[JobState, ...]:
        """Returns every job with its last attempt, in the order in which they were added."""
        return tuple(sorted(map(self._shown, self._folders()), key=lambda state: (state.number, state.job.id)))

    def counts(self) -> dict[str, int]:
        states = [state.state for state in self.states()]
        return {state: states.count(state) for state in STATES}

    def results(self) -> tuple[Result, ...]:
        """Returns the numbers of all finished jobs; the labels of each are those of its job and its own."""
        return tuple(of_job(result, state.job.labels) for state in self.states() for result in state.results)

    def finish(self, job: Job, results: Iterable[Result], error: str | None, seconds: float = 0.0) -> None:
        """Stores the results of a job, or its error."""
        state = "done" if error is None else "failed"
        self._write(JobState(job, self.state(job).number, state, seconds, error, tuple(results)))

    @contextmanager
    def claimed(self, job: Job, seconds: float = 0.0) -> Iterator[bool]:
        """Holds the lock of a job; yields False if another process or thread holds it for so many seconds."""
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self.folder_of(job), seconds))
            except CheckpointError:
                yield False
                return
            yield True

    def _folders(self) -> list[Path]:
        return [path.parent for path in self.folder.glob("*/job.json")]

    def _shown(self, folder: Path) -> JobState:
        state = self._read(folder)
        if state.state != "waiting":
            return state
        with self.claimed(state.job) as is_free:
            return state if is_free else JobState(state.job, state.number, "running")

    def _read(self, folder: Path) -> JobState:
        path = folder / "job.json"
        record = read_record(path, KIND, SCHEMA, FIELDS)
        job = Job(tuple(record["words"]), record["labels"])
        if job.id != folder.name:
            raise CheckpointError(f"{path}: words are not those of the job {folder.name}; the file was edited.")
        seconds, error = record.get("seconds"), record.get("error")
        state = "failed" if error is not None else "waiting" if seconds is None else "done"
        results = tuple(Result(**each) for each in record.get("results", ()))
        return JobState(job, record["number"], state, seconds, error, results)

    def _write(self, state: JobState) -> None:
        job, results = state.job, [asdict(result) for result in state.results]
        record = {"kind": KIND, "schema": SCHEMA, "number": state.number, "words": list(job.words)}
        record |= {"labels": dict(job.labels), "seconds": state.seconds, "results": results, "error": state.error}
        write_json(self.folder_of(job) / "job.json", record)


def run_jobs(
    store: SweepStore, jobs: Collection[Job], work: Work, workers: int, threads: int, log: Log, retry: bool = False
) -> dict[str, int]:
    """Runs those of the jobs that have no result, `workers` side by side; returns the states of all jobs of the store.

    Every job has a process of its own with `threads` CPU threads, so a crash ends one job only; it is stored with its
    error and the others continue. After an interruption the running jobs wait again; if the sweep is killed, their
    processes end by themselves. Other jobs of the store are not run: they may be commands of anybody.

    Args:
        store: The store, to which the jobs were added.
        jobs: The jobs.
        work: What a job does; a function that a module defines.
        workers: Jobs side by side.
        threads: CPU threads of each.
        log: Is called when a job has ended.
        retry: Whether jobs that failed are run again.
    """
    stopped, idle, processes, ended = Event(), list[Subprocess](), list[Subprocess](), list[Job]()

    def run(job: Job) -> None:
        # Whoever reads the states holds each lock for a moment.
        with store.claimed(job, 1.0) as is_mine:
            if not is_mine or stopped.is_set():
                return
            if store.state(job).state in ("done", "" if retry else "failed"):
                ended.append(job)
                return
            if idle:
                process = idle.pop()
            else:
                processes.append(process := Subprocess(keeps_memory=False))
            folder, start = store.folder_of(job).resolve(), time.monotonic()
            words = tuple(word.replace(f"{{{OUT}}}", str(folder)) for word in job.words)
            try:
                results, error = process.call(_run_job, work, words, threads, str(folder / "log.txt"))
                # Without forks the jobs of a process would share its state.
                idle.extend([process] if FORKS else [])
            except ProcessEnded as problem:
                results, error = (), f"the process of the job {problem.how}; its output is in log.txt of its folder."
            except NotSupported as problem:
                results, error = (), str(problem)
            if stopped.is_set():  # which ended the process
                return
            store.finish(job, results, error, time.monotonic() - start)
        ended.append(job)
        outcome = f"done, {len(results)} numbers" if error is None else f"FAILED: {error}"
        log(f"{len(ended)} of {len(jobs)}: {job.title}: {outcome}")

    # The threads wait for the processes.
    with ThreadPoolExecutor(workers) as pool:
        try:
            for task in [pool.submit(run, job) for job in jobs]:
                task.result()
        finally:
            stopped.set()
            for process in processes:
                process.close()
    return store.counts()


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
