"""Partial forward passes: blocks are replaced by their recorded outputs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from attnrx.models import Family
from attnrx.models.blocks import block_names
from attnrx.shapes import Tensor


@contextmanager
def resumed(model: nn.Module, family: Family, given: Any, layer: int) -> Iterator[None]:
    """Skips the first `layer` blocks: the last of them returns `given`, in the format of a block's output.

    With 0 the whole model runs. Hooks on the blocks still run.
    """
    blocks = [model.get_submodule(name) for name in block_names(model, family)[:layer]]
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            # `given` contains the whole batch: a hook on a block disables chunking.
            stack.callback(block.register_forward_hook(_no_hook).remove)
            stack.enter_context(_replaced(block, given if index == layer - 1 else None))
        yield


def _no_hook(module: nn.Module, given: Any, output: Any) -> None:
    pass


@contextmanager
def _replaced(block: nn.Module, given: Any) -> Iterator[None]:
    def forward(tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tokens if given is None else given

    block.forward = forward
    try:
        yield
    finally:
        del block.forward  # restores the method of the class


@contextmanager
def recorded(model: nn.Module, family: Family) -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list of (input, output) of every block, filled by forward passes; the caller must clear it."""
    found: list[tuple[Any, Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append((args[0] if args else kwargs["hidden_states"], output))

    with ExitStack() as stack:
        for name in block_names(model, family):
            handle = model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        yield found


def as_output(tokens: Tensor, output: Any) -> Any:
    """Returns tokens in the format of a block's output: a tensor, or the first element of a tuple."""
    return tokens if isinstance(output, torch.Tensor) else (tokens, *output[1:])
