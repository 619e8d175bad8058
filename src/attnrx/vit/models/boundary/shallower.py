"""Removes blocks. The model's library creates a model of smaller depth, which gets the weights of the kept blocks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import NotSupported
from attnrx.support.modules import evaluating, random_images, tensors_of
from attnrx.support.shapes import Tensor
from attnrx.vit.models.boundary.stock import Stock, copy_modes_
from attnrx.vit.models.boundary.working_copy import answer, library_form
from attnrx.vit.models.family import stated_outputs
from attnrx.vit.models.observation_hooks import recording_calls, replacing_forward
from attnrx.vit.models.working.adoption_proof import difference_of


def shallower_form(model: nn.Module, kept: Sequence[int]) -> nn.Module:
    """Returns a new model of the same library that contains only the blocks `kept`, with copies of their weights.

    As a check, the new model's outputs are compared with the outputs of the original model, in which the removed blocks
    are made to return their inputs.

    Raises:
        NotSupported: The library cannot create such a model, or the outputs in this check differ.
    """
    own: Any = library_form(model)
    stock = Stock(own)
    arguments = stock.arguments(stock.hidden, stock.heads, len(kept))
    if arguments is None:
        raise NotSupported(
            f"{stock.name} cannot lose blocks: no argument of its class in {stock.family.library} states their number. "
            "Leave depth out."
        )
    stock.require_parts(stock.hidden, stock.heads, len(kept))
    origin = replace(stock.origin, arguments=arguments, replaced={})
    with torch.device("meta"):
        paths = stock.family.block_paths(stock.family.create(stock.name, arguments))
    before = stock.family.block_paths(own)
    moved = {before[index]: path for index, path in zip(kept, paths, strict=True)}

    def renamed(name: str) -> str | None:
        block = next((path for path in before if f"{name}.".startswith(f"{path}.")), None)
        if block is None:
            return name
        return f"{moved[block]}{name.removeprefix(block)}" if block in moved else None

    state = {new: tensor.clone() for name, tensor in own.state_dict().items() if (new := renamed(name)) is not None}
    try:
        created = stock.family.created_with(origin, {}, state, stated_outputs(own))
    except RuntimeError as error:
        raise NotSupported(
            f"{stock.name} cannot lose blocks: its library creates other weights at another depth: {error}."
        ) from error
    copy_modes_(own, created, renamed)
    _require_passed(own, created, [before[index] for index in range(len(before)) if index not in kept], stock)
    return created


def _require_passed(own: nn.Module, created: nn.Module, removed: Sequence[str], stock: Stock) -> None:
    """Raises NotSupported if the new model's outputs differ from the original's when it skips the removed blocks."""
    images = random_images(created, stock.origin.input_shape)
    blocks = [own.get_submodule(path) for path in removed]
    with evaluating((own, created)):
        with recording_calls(blocks, lambda call: call.output) as outputs:
            answer(own, images)
        with passing(dict(zip(blocks, outputs, strict=True))):
            expected = tensors_of(answer(own, images))
        difference = difference_of(expected, tensors_of(answer(created, images)))
    if difference:
        raise NotSupported(
            f"{stock.name} cannot lose blocks: as {stock.family.library} creates it with fewer, it answers otherwise "
            f"than with these blocks skipped: {difference}."
        )


@contextmanager
def passing(blocks: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Makes blocks return their input tokens within the context, e.g. in a tuple if they usually return a tuple."""

    def forward(output: Any, tokens: Tensor, *_: Any, **__: Any) -> Any:
        return tokens if isinstance(output, torch.Tensor) else (tokens, *output[1:])

    with ExitStack() as stack:
        for block, output in blocks.items():
            stack.enter_context(replacing_forward(block, partial(forward, output)))
        yield
