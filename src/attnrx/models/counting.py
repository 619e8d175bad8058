"""Counts parameters and MACs from the modules of a model of another library, where no closed form exists."""

import math
from collections.abc import Iterable

from torch import nn

from attnrx.costs import PartCosts


def params(module: nn.Module, without: tuple[str, ...] = ()) -> int:
    """Returns the parameters of a module, except those of the submodules `without`."""
    rest = sum(params(module.get_submodule(name)) for name in without)
    return sum(parameter.numel() for parameter in module.parameters()) - rest


def matrices(module: nn.Module) -> int:
    """Returns the entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def norm_features(module: nn.Module) -> int:
    """Returns the features that a norm normalizes for one token; 0 for any other module."""
    return math.prod(getattr(module, "normalized_shape", (0,)))


def mlp_costs(mlp: nn.Module, tokens: int, changes: Iterable[tuple[nn.Module, int | None]] = ()) -> PartCosts:
    """Returns the costs of an MLP, optionally with some of its maps in another rank (None: one matrix)."""
    saved = sum(matrices(linear) - _entries(linear, rank) for linear, rank in changes)
    return PartCosts(params(mlp) - saved, tokens * (matrices(mlp) - saved))


def _entries(linear: nn.Module, rank: int | None) -> int:
    inputs, outputs = int(linear.in_features), int(linear.out_features)  # type: ignore[arg-type]
    return inputs * outputs if rank is None else rank * (inputs + outputs)
