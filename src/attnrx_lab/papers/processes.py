"""Coordinates the processes of one launcher (`torchrun`, `accelerate launch`), which share the work of each run.

All processes train together and exchange gradients, and all processes measure. The first process holds the locks,
decides which parts of a run are missing, and writes files. The other processes follow its decisions, so that all of
them take part in the same trainings.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from attnrx.support.atomic_writes import file_lock
from attnrx.support.optional import required_module
from attnrx.training.trainer import connect_processes

T = TypeVar("T")

# A process may have to wait until another launch finishes its training and releases the folder.
PATIENCE = timedelta(days=30)


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Holds a folder's lock for all processes of this launch. Other launches wait for the lock."""
    if is_first():
        with file_lock(folder, -1):
            agreed(None)
            yield
    else:
        agreed(None)  # waits until the first process has the lock
        yield


def agreed(decision: T) -> T:
    """Returns the decision of the first process in all processes, which wait here for the first process."""
    if _several():
        return required_module("accelerate.utils", "train", "several processes").broadcast_object_list([decision])[0]
    return decision


def is_first() -> bool:
    """Returns whether this process is the only one or the first of its launch. Only this process writes files."""
    return not _several() or connect_processes().is_main_process


def _several() -> bool:
    """Returns whether a launcher started several processes. The first call connects the processes."""
    # Processes connect here and not in the trainer, because they already exchange decisions before a training.
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and connect_processes(timeout=PATIENCE).num_processes > 1
