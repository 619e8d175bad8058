"""Baselines: published compression methods, each implemented as in its paper, for comparisons."""

from attnrx_lab.baselines.factoring import (
    FACTORS,
    MAPS,
    FactoringBaseline,
    MapStatistics,
    ModelCompressor,
    factored_model_costs,
    map_addresses,
    with_factors,
)
from attnrx_lab.baselines.torch_pruning import TorchPruningBaseline

BASELINES = (*FACTORS, "torch_pruning")

__all__ = [
    "BASELINES",
    "FACTORS",
    "MAPS",
    "FactoringBaseline",
    "MapStatistics",
    "ModelCompressor",
    "TorchPruningBaseline",
    "factored_model_costs",
    "map_addresses",
    "with_factors",
]
