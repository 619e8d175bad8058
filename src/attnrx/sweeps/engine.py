"""The contract of what runs jobs: tasks go in, and how each ended comes out, in any order."""

import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from attnrx.errors import AttnrxError, InvalidInput
from attnrx.results import Ended

VERSIONS = ("attnrx", "torch")


@dataclass(frozen=True)
class Task:
    """A job on its way to a worker: its words with all folders filled in, its log file, and how many CPU threads."""

    id: str
    words: tuple[str, ...]
    log: str
    threads: int


Work = Callable[[Task], Any]  # gives a JSON-ready record, or raises; it must be importable by its name


class Engine(ABC):
    """Runs at most `workers` tasks at a time, each by itself: one that fails or dies takes no other with it."""

    def __init__(self, work: Work, workers: int):
        if workers < 1:
            raise InvalidInput(f"workers={workers}: give at least one.")
        self.work, self.workers = work, workers

    @abstractmethod
    def start(self, task: Task) -> None:
        """Starts a task; there are never more than `workers`."""

    @abstractmethod
    def wait(self, seconds: float) -> Sequence[tuple[str, Ended]]:
        """Gives the tasks that ended, by id, as soon as there is one; after so many seconds, none."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what is still running."""


def attempt(work: Work, task: Task) -> Ended:
    """Runs one task; an error becomes its outcome."""
    started = time.perf_counter()
    record, error = None, None
    try:
        record = work(task)
    except AttnrxError as found:
        error = str(found)
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    return Ended(time.perf_counter() - started, record, error, platform.node(), _versions())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree
            continue
    return found
