"""The processes of one launch (`torchrun`, `accelerate launch`), which make every run of a recipe together.

All of them train, because training exchanges gradients, and all measure. The first one holds the locks, decides what is
still to be made, and writes: the others follow its decisions, so that they meet in the same trainings.
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

# One process may wait for a folder that another launch holds as long as its training takes.
PATIENCE = timedelta(days=30)


@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder for all processes of this launch; another launch waits for it."""
    if is_first():
        with file_lock(folder, -1):
            agreed(None)
            yield
    else:
        agreed(None)  # until the first has the lock
        yield


def agreed(decision: T) -> T:
    """Returns the first process's decision in every process; none goes on before the first has come here."""
    if _several():
        return required_module("accelerate.utils", "train", "several processes").broadcast_object_list([decision])[0]
    return decision


def is_first() -> bool:
    """Whether this process writes: the only one, or the first of its launch."""
    return not _several() or connect_processes().is_main_process


def _several() -> bool:
    """Whether a launcher started several processes; the first call connects them."""
    # Here and not by the trainer, because what comes before a training is decided together, too.
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and connect_processes(timeout=PATIENCE).num_processes > 1
