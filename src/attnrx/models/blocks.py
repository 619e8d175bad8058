"""The blocks of a model, one per attention layer: their names, parameters and outputs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attnrx.errors import NotSupported
from attnrx.models.family import Family
from attnrx.shapes import Tensor


def block_names(model: nn.Module, family: Family) -> tuple[str, ...]:
    """Returns the path of the block around every attention layer: the layer's path up to its last number."""
    paths = {id(module): name for name, module in model.named_modules()}
    return tuple(_up_to_number(paths[id(layer)]) for layer in family.attention(model))


def parameter_blocks(model: nn.Module, family: Family) -> dict[str, int]:
    """Returns the block index of every parameter, in the order of the forward pass.

    0 stands for parameters before the blocks (patches, position embeddings, tokens), 1 to L for the blocks, L + 1 for
    parameters after them.
    """
    blocks = block_names(model, family)
    indices: dict[str, int] = {}
    last_block = 0
    for name, _ in model.named_parameters():
        own = next((index for index, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        last_block = max(last_block, own or 0)
        indices[name] = own or (0 if not last_block else len(blocks) + 1)
    return indices


@contextmanager
def recording_blocks(model: nn.Module, family: Family) -> Iterator[list[Tensor]]:
    """Collects the output of every block in each forward pass; the caller clears the list."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [model.get_submodule(name).register_forward_hook(record) for name in block_names(model, family)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _up_to_number(path: str) -> str:
    parts = path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        raise NotSupported(f"the attention layer {path!r} is in no numbered block, so its block cannot be named.")
    return ".".join(parts[: numbers[-1] + 1])
