"""Runs of experiments in several processes, with a limit on the time."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from attnrx.support.progress import Log
from attnrx.support.subprocess_runner import Subprocess
from attnrx_lab.papers.experiment import Experiment, MeasureKey


@dataclass(frozen=True)
class Job:
    """An experiment, the folder of its run, and the numbers to measure."""

    experiment: Experiment
    folder: Path
    keys: Collection[MeasureKey]


def run_jobs(jobs: Sequence[Job], processes: int, seconds: float | None, log: Log) -> list[bool]:
    """Runs the jobs in their order, `processes` at a time, and returns which of them are finished, now or before.

    Jobs of one folder run one after the other. After `seconds` no job begins, and those that run are interrupted: a
    training saves a checkpoint, evidence that is complete stays in the folder. The first error stops the others in
    the same way.
    """
    deadline = None if seconds is None else time.time() + seconds  # by the clock that processes share
    if processes == 1:
        for job in jobs:
            _run(job, deadline, log)
    else:
        _run_side_by_side(jobs, processes, deadline, log)
    return [job.experiment.is_finished(job.folder, job.keys) for job in jobs]


def _run_side_by_side(jobs: Sequence[Job], processes: int, deadline: float | None, log: Log) -> None:
    queue = _Queue(jobs)
    # One thread waits for each process; the first one that raises ends the queue and the other processes.
    workers = [Subprocess(keeps_memory=False) for _ in range(min(processes, len(jobs)))]
    with ThreadPoolExecutor(len(workers)) as pool:
        tasks = [pool.submit(queue.work, worker, deadline, len(workers), log) for worker in workers]
        try:
            for task in tasks:
                task.result()
        finally:
            queue.close()
            for worker in workers:
                worker.close()


class _Queue:
    """The jobs that have not begun, and the folders of those that run."""

    def __init__(self, jobs: Sequence[Job]):
        self.jobs = jobs
        self.waiting, self.busy = list(range(len(jobs))), set[Path]()
        self.changed = threading.Condition()

    def work(self, worker: Subprocess, deadline: float | None, processes: int, log: Log) -> None:
        """Runs jobs in one process until none is left."""
        while (number := self._next()) is not None:
            job = self.jobs[number]
            try:
                worker.call(_run_here, job, deadline, processes, on_line=log)
            except BaseException:
                self.close()
                raise
            finally:
                with self.changed:
                    self.busy.remove(job.folder)
                    self.changed.notify_all()

    def close(self) -> None:
        """Gives out no further jobs."""
        with self.changed:
            self.waiting.clear()
            self.changed.notify_all()

    def _next(self) -> int | None:
        """Returns the first job whose folder is free, and waits for one; None if no job is left."""
        with self.changed:
            while self.waiting:
                for number in self.waiting:
                    if self.jobs[number].folder not in self.busy:
                        self.waiting.remove(number)
                        self.busy.add(self.jobs[number].folder)
                        return number
                self.changed.wait()
        return None


def _run_here(job: Job, deadline: float | None, processes: int) -> None:
    """Runs a job in a process of its own, which has a share of the CPU's cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    _run(job, deadline, partial(print, flush=True))


def _run(job: Job, deadline: float | None, log: Log) -> None:
    """Runs a job until the deadline."""
    if deadline is None:
        job.experiment.run(job.folder, log, job.keys)
        return
    left, late = deadline - time.time(), list[bool]()
    if left <= 0:
        return
    try:
        with _interrupted_after(left, late):
            job.experiment.run(job.folder, log, job.keys)
    except KeyboardInterrupt as stop:
        if not late:
            raise
        log(f"{job.experiment.name}: the time is up; {str(stop) or f'the evidence so far is in {job.folder}'}")


@contextmanager
def _interrupted_after(seconds: float, late: list[bool]) -> Iterator[None]:
    """Interrupts the block as Ctrl-C does after some seconds, and then adds to `late`."""

    def interrupt() -> None:
        late.append(True)
        _thread.interrupt_main()

    # A process that a shell started in the background ignores SIGINT, and interrupt_main has no effect there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
