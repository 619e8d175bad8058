"""Running the jobs of a store until none is left: claimed one by one, recorded as they end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attnrx.errors import CheckpointError
from attnrx.results import LEASE, Ended, Job, Result, Store
from attnrx.sweeps.engine import Engine, Task
from attnrx.sweeps.grid import OUT
from attnrx.sweeps.rows import rows_of

Say = Callable[[str], None]
LOG = "log.txt"


def run_jobs(store: Store, engine: Engine, threads: int, say: Say) -> dict[str, int]:
    """Runs what waits in the store, and what somebody began who is gone; gives how many jobs are in every state.

    A job that fails is recorded with its error, and the others go on. Whatever ends this early, a kill too, leaves
    every finished job recorded: the next call goes on with the rest.
    """
    running: dict[str, Job] = {}
    try:
        while True:
            while len(running) < engine.workers and (job := store.claim()) is not None:
                running[job.id] = job
                engine.start(_task(job, job_folder(store, job), threads))
            if not running:
                return store.counts()
            for name, ended in engine.wait(LEASE / 4):
                _record(store, running.pop(name), ended, say)
            store.renew()
    finally:
        engine.stop()
        store.release()


def job_folder(store: Store, job: Job) -> Path:
    """Gives the folder of a job, beside the store: its log, and what its command writes to {out}."""
    return store.path.with_suffix(".jobs") / job.id


def _task(job: Job, folder: Path, threads: int) -> Task:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create the folder {folder}: {error.strerror or error}.") from error
    place = str(folder.resolve())
    words = tuple(word.replace(f"{{{OUT}}}", place) for word in job.words)
    return Task(job.id, words, str(folder.resolve() / LOG), threads)


def _record(store: Store, job: Job, ended: Ended, say: Say) -> None:
    rows: tuple[Result, ...] = ()
    if ended.error is None:
        try:
            rows = rows_of(ended.record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            ended = replace(ended, error=f"its record has no numbers that can be read ({error!r}).")
    if not store.finish(job, ended, rows):
        say(f"{described(job)}: another process had taken it over, and its result counts")
        return
    counts = store.counts()
    over = counts["done"] + counts["failed"]
    how = f"done, {len(rows)} numbers" if ended.error is None else f"FAILED: {ended.error}"
    say(f"{over} of {sum(counts.values())}: {described(job)}: {how} ({ended.seconds:.1f} s)")


def described(job: Job) -> str:
    """Gives the labels of a job in one line, or its words where it has none."""
    return " ".join(f"{name}={value}" for name, value in job.labels.items()) or " ".join(job.words)
