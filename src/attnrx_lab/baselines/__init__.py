"""Baselines: published compression methods, each implemented as in its paper, for comparisons."""

from collections.abc import Sequence

from torch import nn

from attnrx.data import ImageSet
from attnrx.errors import InvalidInput, UnknownName
from attnrx_lab.baselines.baseline import ModelCompressor
from attnrx_lab.baselines.factoring import (
    FACTORS,
    MAPS,
    FactoringBaseline,
    MapStatistics,
    factored_model_costs,
    map_addresses,
    with_factors,
)
from attnrx_lab.baselines.torch_pruning import TorchPruningBaseline

TORCH_PRUNING = "torch_pruning"
BASELINES = (*FACTORS, TORCH_PRUNING)

__all__ = [
    "BASELINES",
    "FACTORS",
    "MAPS",
    "FactoringBaseline",
    "MapStatistics",
    "ModelCompressor",
    "TorchPruningBaseline",
    "factored_model_costs",
    "make_baseline",
    "map_addresses",
    "require_baseline",
    "with_factors",
]


def require_baseline(name: str, maps: Sequence[str]) -> None:
    """Raises UnknownName for an unknown baseline or map, and InvalidInput for maps of a baseline that has none."""
    if name not in BASELINES:
        raise UnknownName("baseline", name, BASELINES)
    for own in maps:
        if own not in MAPS:
            raise UnknownName("linear map", own, MAPS)
    if maps and name == TORCH_PRUNING:
        raise InvalidInput("torch_pruning prunes heads and MLPs together; leave maps= out.")


def make_baseline(
    model: nn.Module, name: str, maps: Sequence[str], calibration: ImageSet, statistics: MapStatistics
) -> ModelCompressor:
    """Returns the baseline of that name for a model, calibrated on these images or on the statistics of them."""
    require_baseline(name, maps)
    if name == TORCH_PRUNING:
        return TorchPruningBaseline(model, calibration)
    return FactoringBaseline(model, name, maps, statistics)
