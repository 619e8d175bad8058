"""Parameters and products counted on the modules of a foreign model, where no closed form is known."""

import math
from collections.abc import Iterable

from torch import nn

from attnrx.costs import PartCosts


def params(module: nn.Module, without: tuple[str, ...] = ()) -> int:
    """Parameters of a module, those of some of its submodules left out."""
    rest = sum(params(module.get_submodule(name)) for name in without)
    return sum(parameter.numel() for parameter in module.parameters()) - rest


def matrices(module: nn.Module) -> int:
    """Entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def norm_features(module: nn.Module) -> int:
    """Features that a norm divides for one token; 0 for any other module."""
    return math.prod(getattr(module, "normalized_shape", (0,)))


def mlp_costs(mlp: nn.Module, tokens: int, changes: Iterable[tuple[nn.Module, int | None]] = ()) -> PartCosts:
    """Prices an MLP as it is, or with some of its maps written in another rank (None: as one matrix)."""
    saved = sum(matrices(linear) - _entries(linear, rank) for linear, rank in changes)
    return PartCosts(params(mlp) - saved, tokens * (matrices(mlp) - saved))


def _entries(linear: nn.Module, rank: int | None) -> int:
    inputs, outputs = int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
    return inputs * outputs if rank is None else rank * (inputs + outputs)
