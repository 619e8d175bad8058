"""Baselines: published compression methods, each implemented as in its paper, for comparisons."""

from attnrx_lab.baselines.factoring import (
    FACTORS,
    FactoringBaseline,
    MapStatistics,
    ModelCompressor,
)
from attnrx_lab.baselines.torch_pruning import TorchPruningBaseline

BASELINES = (*FACTORS, "torch_pruning")

__all__ = [
    "BASELINES",
    "FACTORS",
    "FactoringBaseline",
    "MapStatistics",
    "ModelCompressor",
    "TorchPruningBaseline",
]
