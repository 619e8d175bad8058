"""The blocks of a model, one for each attention layer: their names, their parameters, their outputs."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from attnrx.errors import NotSupported
from attnrx.models.family import Family
from attnrx.shapes import Tensor


def block_names(model: nn.Module, family: Family) -> tuple[str, ...]:
    """Returns the path of the block around every attention layer: the part of the layer's path up to its number."""
    paths = {id(module): name for name, module in model.named_modules()}
    return tuple(_up_to_number(paths[id(layer)]) for layer in family.attention(model))


def parameter_blocks(model: nn.Module, family: Family) -> dict[str, int]:
    """Returns the place of every parameter on the way from image to logits.

    0 is what comes before the blocks (patches, positions, tokens), 1 to L are the blocks, L + 1 is what comes after.
    """
    blocks = block_names(model, family)
    places: dict[str, int] = {}
    met = 0
    for name, _ in model.named_parameters():
        own = next((place for place, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        met = max(met, own or 0)
        places[name] = own or (0 if not met else len(blocks) + 1)
    return places


@contextmanager
def recording_blocks(model: nn.Module, family: Family) -> Iterator[list[Tensor]]:
    """Collects what every block gives in a forward pass; whoever reads the list also clears it."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [model.get_submodule(name).register_forward_hook(keep) for name in block_names(model, family)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _up_to_number(path: str) -> str:
    parts = path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        raise NotSupported(f"the attention layer {path!r} is in no numbered block, so its block cannot be named.")
    return ".".join(parts[: numbers[-1] + 1])
