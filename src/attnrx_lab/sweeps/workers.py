"""Runs the waiting jobs of a sweep, each in a process of its own, several side by side."""

import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any

from attnrx.errors import AttnrxError, CheckpointError, InvalidInput
from attnrx_lab.sweeps.grid import OUT, Job, Result
from attnrx_lab.sweeps.study import SweepStudy
from attnrx_lab.sweeps.summary import rows_of

LOG = "log.txt"
Work = Callable[[tuple[str, ...], int], dict[str, Any]]  # words and CPU threads -> a JSON-ready record; importable


@dataclass(frozen=True)
class Attempt:
    """How one attempt at a job ended: its record, or its error."""

    seconds: float
    record: dict[str, Any] | None = None
    error: str | None = None


class JobWorkers:
    """Runs jobs of a study with `workers` processes side by side, each with `threads` CPU threads.

    Every job has a new process, so a crash ends one job only. Where the system supports it the processes are forked
    from a server that has already imported `preload`. A process ends by itself when the sweep is killed.
    """

    def __init__(self, study: SweepStudy, work: Work, workers: int, threads: int, preload: Sequence[str] = ()):
        if workers < 1 or threads < 1:
            raise InvalidInput(f"workers={workers}, threads={threads}: give at least one of each.")
        self.study, self.work, self.workers, self.threads = study, work, workers, threads
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._processes: set[ForkServerProcess | SpawnProcess] = set()
        # Plain fork would copy locks that other threads of this process hold.
        if "forkserver" in multiprocessing.get_all_start_methods():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(list(preload))
        else:
            self._context = multiprocessing.get_context("spawn")

    def run(self, log: Callable[[str], None]) -> dict[str, int]:
        """Runs jobs until none waits and returns the number of jobs in every state.

        A job that fails is stored with its error and the others continue. After an interruption the running jobs wait
        again.
        """
        self.study.requeue_abandoned()
        try:
            with ThreadPoolExecutor(self.workers) as pool:
                running = [pool.submit(self._run_jobs, log) for _ in range(self.workers)]
                try:
                    for one in running:
                        one.result()
                finally:
                    self._stop()
        finally:
            self.study.requeue_own()
        return self.study.counts()

    def _stop(self) -> None:
        self._stopped.set()
        with self._lock:
            for process in self._processes:
                process.kill()

    def _run_jobs(self, log: Callable[[str], None]) -> None:
        while not self._stopped.is_set():
            with self._lock:
                taken = self.study.take()
            if taken is None:
                return
            trial, job = taken
            attempt = self._attempt(job)
            if self._stopped.is_set():
                return
            results, error = _numbers(attempt)
            with self._lock:
                stored = self.study.finish(trial, attempt.seconds, results, error, _versions())
                counts = self.study.counts()
            if not stored:
                log(f"{job.title}: another worker has run it in the meantime; this result is dropped")
                continue
            ended = f"done, {len(results)} numbers" if error is None else f"FAILED: {error}"
            done = counts["done"] + counts["failed"]
            log(f"{done} of {sum(counts.values())}: {job.title}: {ended} ({attempt.seconds:.1f} s)")

    def _attempt(self, job: Job) -> Attempt:
        folder = (self.study.folder / job.id).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot create the folder {folder}: {error.strerror or error}.") from error
        words = tuple(word.replace(f"{{{OUT}}}", str(folder)) for word in job.words)
        started, log = time.perf_counter(), str(folder / LOG)
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(sender, self.work, words, self.threads, log), name=job.id)
        with self._lock:
            # Under the lock, so that `_stop` kills every process that was started.
            if self._stopped.is_set():
                return Attempt(0.0, error="stopped")
            process.start()
            self._processes.add(process)
        sender.close()  # else the receiver would wait for this copy after a crash
        record, error = _received(receiver)
        process.join()
        with self._lock:
            self._processes.discard(process)
        if record is None and error is None:
            error = f"the process of the job {_exit_text(process.exitcode)}; its output is in {log}."
        return Attempt(time.perf_counter() - started, record, error)


def threads_each(workers: int) -> int:
    """Returns the CPU threads of each worker, so that all together are as many as there are processors."""
    return max(1, (os.cpu_count() or 1) // workers)


def _received(pipe: Connection) -> tuple[dict[str, Any] | None, str | None]:
    with pipe:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return None, None


def _serve(pipe: Connection, work: Work, words: tuple[str, ...], threads: int, log: str) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sweep, which ends its processes
    with open(log, "ab") as file:  # noqa: PTH123 - for its descriptor, which libraries write to as well
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        pipe.send((work(words, threads), None))
    except AttnrxError as error:
        pipe.send((None, str(error)))
    except Exception as error:
        pipe.send((None, f"{type(error).__name__}: {error}"))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _exit_text(code: int | None) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"


def _numbers(attempt: Attempt) -> tuple[tuple[Result, ...], str | None]:
    if attempt.record is None:
        return (), attempt.error
    try:
        return rows_of(attempt.record), None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return (), f"its record has no numbers that can be read ({error!r})."


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("attnrx", "torch")}}
