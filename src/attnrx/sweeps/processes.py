"""The engine that needs nothing else: a process of its own for every task, on this machine."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess

from attnrx.results import Ended
from attnrx.sweeps.engine import Engine, Task, Work, attempt


class Processes(Engine):
    """Every task in a fresh process: nothing is left over from the one before, and a crash ends one task only.

    Where the system has it, processes are forked off a server that has imported `preload` already and has run nothing,
    which saves each of them the seconds that imports take. A process whose sweep is gone, however it went, ends at
    once.
    """

    def __init__(self, work: Work, workers: int, preload: Sequence[str] = ()):
        super().__init__(work, workers)
        self._running: dict[Connection, tuple[Task, ForkServerProcess | SpawnProcess, float]] = {}
        if "forkserver" in multiprocessing.get_all_start_methods():
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload(list(preload))
        else:
            self._context = multiprocessing.get_context("spawn")

    def start(self, task: Task) -> None:
        """Starts a process."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(theirs, self.work, task), name=task.id)
        process.start()
        theirs.close()
        self._running[ours] = (task, process, time.perf_counter())

    def wait(self, seconds: float) -> list[tuple[str, Ended]]:
        """Waits for the first process to answer, or to die."""
        done = [pipe for pipe in wait(list(self._running), seconds) if isinstance(pipe, Connection)]
        return [self._ended(pipe) for pipe in done]

    def stop(self) -> None:
        """Ends the processes."""
        for _, process, _ in self._running.values():
            process.kill()
        for pipe, (_, process, _) in self._running.items():
            process.join()
            pipe.close()
        self._running.clear()

    def _ended(self, pipe: Connection) -> tuple[str, Ended]:
        task, process, started = self._running.pop(pipe)
        try:
            ended = pipe.recv()
        except EOFError:
            ended = None
        pipe.close()
        process.join()
        if ended is None:
            said = f"the process of the job {_death(process.exitcode)}; what it said is in {task.log}."
            ended = Ended(time.perf_counter() - started, error=said)
        return task.id, ended


def _answer(pipe: Connection, work: Work, task: Task) -> None:
    threading.Thread(target=_end_when_orphaned, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the sweep, which ends its processes
    with open(task.log, "ab") as log:  # noqa: PTH123 - for its descriptor, which libraries write to as well
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    pipe.send(attempt(work, task))


def _end_when_orphaned() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # whatever it does: the job is anybody's now


def _death(code: int | None) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
