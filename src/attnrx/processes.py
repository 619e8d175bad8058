"""The processes that a launcher started: which one this is, and how they put together what each of them found.

Every function here but `place` and `leave` is for all of them at once: one that stays away lets the others wait.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed

from attnrx.errors import DataError
from attnrx.shapes import Tensor

Value = TypeVar("Value")


def join() -> tuple[int, int]:
    """Joins the processes that `accelerate launch` or `torchrun` started, if there are several; gives `place`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not _joined():
        from accelerate import PartialState

        PartialState()
    return place()


def leave() -> None:
    """Ends the process group, if there is one: a process that exits inside it can abort in gloo's threads."""
    if _joined():
        distributed.destroy_process_group()


def place() -> tuple[int, int]:
    """Which process this is, of how many; the only one where none were joined."""
    return (distributed.get_rank(), distributed.get_world_size()) if _joined() else (0, 1)


def all_rows(parts: Sequence[Tensor]) -> Tensor:
    """Puts the rows of all processes together, those of the first process first; a process may have none."""
    found = [part for part in gathered(torch.cat(list(parts)) if parts else None) if part is not None]
    if not found:
        raise DataError("no process was given any image; give at least one.")
    return torch.cat(found)


def gathered(value: Value) -> list[Value]:
    """Returns what each process has, in their order, to all of them; tensors should lie on the CPU."""
    found: list[Any] = [value] * place()[1]
    if place()[1] > 1:
        distributed.all_gather_object(found, value)
    return found


def from_first(make: Callable[[], Value]) -> Value:
    """Lets the first process alone make something, and returns it to all."""
    if place()[1] == 1:
        return make()
    value: list[Any] = [make() if place()[0] == 0 else None]
    distributed.broadcast_object_list(value, src=0)
    return value[0]


def _joined() -> bool:
    return distributed.is_available() and distributed.is_initialized()
