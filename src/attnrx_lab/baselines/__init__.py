"""Baselines: published compression methods, each implemented as in its paper, for comparisons."""

from collections.abc import Mapping

from attnrx_lab.baselines.compressor import ModelCompressor, PrescribedBaseline
from attnrx_lab.baselines.corp import CorpBaseline
from attnrx_lab.baselines.diffrate import DiffRateBaseline
from attnrx_lab.baselines.factoring import FACTORS, FactoringBaseline, MapStatistics
from attnrx_lab.baselines.gates import GatedBaseline, GatedModel, prescribe_gates
from attnrx_lab.baselines.snapvit import SnapVitBaseline
from attnrx_lab.baselines.torch_pruning import TorchPruningBaseline
from attnrx_lab.baselines.tucker import TUCKER, TUCKER_TERMS, TuckerBaseline

PRESCRIBED: Mapping[str, type[PrescribedBaseline]] = {each.name: each for each in (CorpBaseline, SnapVitBaseline)}
DECOMPOSED = (TUCKER, TUCKER_TERMS)
BASELINES = (*FACTORS, *PRESCRIBED, *DECOMPOSED, "wdpruning", "diffrate", "torch_pruning")

__all__ = [
    "BASELINES",
    "DECOMPOSED",
    "FACTORS",
    "PRESCRIBED",
    "CorpBaseline",
    "DiffRateBaseline",
    "FactoringBaseline",
    "GatedBaseline",
    "GatedModel",
    "MapStatistics",
    "ModelCompressor",
    "PrescribedBaseline",
    "SnapVitBaseline",
    "TorchPruningBaseline",
    "TuckerBaseline",
    "prescribe_gates",
]
