"""Distributed processes started by a launcher: rank, world size and collective operations.

All functions except `place` and `leave` are collective: every process must call them, or the others block.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from attnrx.errors import DataError
from attnrx.shapes import Tensor

Value = TypeVar("Value")


def join_process_group() -> tuple[int, int]:
    """Initializes the process group of `accelerate launch` or `torchrun`, if WORLD_SIZE > 1; returns `place()`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _joined():
        from accelerate import PartialState

        PartialState()
    return place()


def leave() -> None:
    """Destroys the process group, if there is one: a process that exits inside it can abort in gloo's threads."""
    if _joined():
        distributed.destroy_process_group()


def place() -> tuple[int, int]:
    """Returns (rank, world size); (0, 1) without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if _joined() else (0, 1)


def all_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates the rows of all processes in the order of ranks; a process may have none."""
    found = [part for part in all_gathered(torch.cat(list(parts)) if parts else None) if part is not None]
    if not found:
        raise DataError("no process was given any image; give at least one.")
    return torch.cat(found)


def all_gathered(value: Value) -> list[Value]:
    """All-gathers the values of all processes in the order of ranks; tensors should be on the CPU."""
    _, count = place()
    found: list[Any] = [value] * count
    if count > 1:
        distributed.all_gather_object(found, value)
    return found


def from_first(make: Callable[[], Value]) -> Value:
    """Calls `make` in the process of rank 0 only, and broadcasts the result to all."""
    rank, count = place()
    value: list[Any] = [make() if rank == 0 else None]
    if count > 1:
        distributed.broadcast_object_list(value, src=0)
    return value[0]


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()
