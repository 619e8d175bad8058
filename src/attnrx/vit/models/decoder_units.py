"""Units around a Vision Transformer, e.g. the channels of a decoder: removed from two maps and what is between."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.models.mlp import keep_units_of_


class Cut(NamedTuple):
    """Two maps, by their paths, of which so many `units` between them are left; `between` are parts with weights per
    unit, as in `Pair`.
    """

    first: str
    second: str
    between: tuple[str, ...]
    units: int

    def shape_(self, module: nn.Module) -> None:
        """Gives a module that was created anew the shapes of the smaller one.

        Raises:
            InvalidInput: It has no such parts, or fewer units.
        """
        parts: dict[str, Any] = dict(module.named_modules())
        missing = [path for path in (self.first, self.second, *self.between) if path not in parts]
        units = 0 if missing else parts[self.first].weight.shape[_dims(parts[self.first])[1]]
        if missing or not 0 < self.units <= units:
            found = f"without the part {missing[0]!r:.80}" if missing else f"with {units} units in {self.first!r:.80}"
            raise InvalidInput(f"the module was created {found}, of which {self.units} should be left.")
        keep_units_around_(module, self, torch.arange(units, device="cpu") < self.units)


def keep_units_around_(module: nn.Module, cut: Cut, keep: Bool[Tensor, "units"]) -> None:
    """Removes the units that are not kept between two maps of a module, in place."""
    first, second = module.get_submodule(cut.first), module.get_submodule(cut.second)
    _take_(first, _dims(first)[1], keep, ("bias",))
    _take_(second, _dims(second)[0], keep, ())
    for path in cut.between:
        keep_units_of_(module.get_submodule(path), keep)


def input_weight(part: Any) -> tuple[Tensor, Sequence[int]]:
    """Returns the weight of a map as [outputs * kernel, units], and the shape [units, ...] of its transpose."""
    weight = part.weight.detach().movedim(_dims(part)[0], 0)
    return weight.flatten(1).T, weight.shape


def set_input_weight_(part: Any, weight: Tensor, shape: Sequence[int]) -> None:
    """Sets the weight of a map from [outputs * kernel, units], as `input_weight` returns it."""
    with torch.no_grad():
        part.weight.copy_(weight.T.reshape(-1, *shape[1:]).movedim(0, _dims(part)[0]))


def _dims(part: nn.Module) -> tuple[int, int]:
    """Returns the dimensions of the inputs and of the outputs in the weight of a map."""
    return (0, 1) if isinstance(part, nn.ConvTranspose2d) else (1, 0)


def _take_(part: Any, dim: int, keep: Bool[Tensor, "units"], others: Sequence[str]) -> None:
    index = keep.nonzero()[:, 0].to(part.weight.device)
    is_input = dim == _dims(part)[0]
    part.weight = nn.Parameter(part.weight.detach().index_select(dim, index), part.weight.requires_grad)
    for name in others:
        tensor = getattr(part, name)
        if tensor is not None:
            setattr(part, name, nn.Parameter(tensor.detach()[index], tensor.requires_grad))
    kind = "channels" if isinstance(part, nn.Conv2d | nn.ConvTranspose2d) else "features"
    setattr(part, f"{'in' if is_input else 'out'}_{kind}", len(index))
