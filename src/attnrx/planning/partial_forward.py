"""Running a model from the middle: what the layers before have given is put in their place."""

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
    """Lets the first `layer` blocks compute nothing: the last of them gives `given`, as a block gives its output.

    With 0 the whole model runs. Hooks on the blocks run as ever.
    """
    blocks = [model.get_submodule(name) for name in block_names(model, family)[:layer]]
    with ExitStack() as stack:
        for index, block in enumerate(blocks):
            # What is given is of all images: a hook on a block lets the batch pass as a whole.
            stack.callback(block.register_forward_hook(_seen).remove)
            stack.enter_context(_replaced(block, given if index == layer - 1 else None))
        yield


def _seen(module: nn.Module, given: Any, output: Any) -> None:
    pass


@contextmanager
def _replaced(block: nn.Module, given: Any) -> Iterator[None]:
    def forward(tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tokens if given is None else given

    block.forward = forward
    try:
        yield
    finally:
        del block.forward  # the one of the class again


@contextmanager
def recorded(model: nn.Module, family: Family) -> Iterator[list[tuple[Any, Any]]]:
    """Collects what every block is given and returns in a forward pass; whoever reads the list also clears it."""
    found: list[tuple[Any, Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found.append((args[0] if args else kwargs["hidden_states"], output))

    with ExitStack() as stack:
        for name in block_names(model, family):
            handle = model.get_submodule(name).register_forward_hook(keep, with_kwargs=True)
            stack.callback(handle.remove)
        yield found


def as_output(tokens: Tensor, output: Any) -> Any:
    """Returns tokens in the shape in which a block gave its output: alone, or the first of several."""
    return tokens if isinstance(output, torch.Tensor) else (tokens, *output[1:])
