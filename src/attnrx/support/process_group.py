"""Distributed processes started by a launcher: rank, world size and collective operations.

All functions except `rank_and_size` and `leave_process_group` are collective: every process must call
them, or the others block.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from attnrx.support.errors import DataError, NotSupported
from attnrx.support.shapes import Tensor

Value = TypeVar("Value")


def join_process_group() -> tuple[int, int]:
    """Initializes the process group of `accelerate launch` or `torchrun`, if WORLD_SIZE > 1; returns rank and size."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _joined():
        # Accelerate chooses device and backend of the processes as it does for a training.
        from accelerate import PartialState

        PartialState()
    return rank_and_size()


def leave_process_group() -> None:
    """Destroys the process group, if there is one: a process that exits inside it can abort in gloo's threads."""
    if _joined():
        distributed.destroy_process_group()


def rank_and_size() -> tuple[int, int]:
    """Returns (rank, world size); (0, 1) without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if _joined() else (0, 1)


def gather_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates the rows, of any shape, of all processes in the order of ranks; a process may have none.

    Raises:
        DataError: No process has any rows.
    """
    # None and not an empty tensor, because a process without images does not know the number of columns.
    gathered = [part for part in all_gather(torch.cat(list(parts)) if parts else None) if part is not None]
    if not gathered:
        raise DataError("no process was given any image; give at least one.")
    return torch.cat(gathered)


def all_gather(value: Value) -> list[Value]:
    """All-gathers the values of all processes in the order of ranks; tensors should be on the CPU."""
    _, count = rank_and_size()
    values: list[Any] = [value] * count
    if count > 1:
        # As objects, because gathering tensors needs the same shape in all processes.
        distributed.all_gather_object(values, value)
    return values


def from_first(make: Callable[[], Value]) -> Value:
    """Calls `make` in the process of rank 0 only, and broadcasts the result to all.

    Raises:
        NotSupported: `make` failed; rank 0 raises its error.
    """
    rank, count = rank_and_size()
    if count == 1:
        return make()
    outcome: list[Any] = [None, None]
    try:
        if rank == 0:
            outcome[0] = make()
    except Exception as error:
        outcome[1] = f"{type(error).__name__}: {error}"
        raise
    finally:
        # Also after an error, because the other ranks wait here.
        distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise NotSupported(f"rank 0 failed ({outcome[1]}); see its output.")
    return outcome[0]


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()
