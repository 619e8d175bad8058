"""Published compression methods, implemented from their papers as baselines."""

from collections.abc import Mapping

from attnrx_lab.baselines.compressor import ModelCompressor, PrescribedBaseline, SearchedBaseline
from attnrx_lab.baselines.corp import CorpBaseline
from attnrx_lab.baselines.diffrate import DiffRateBaseline
from attnrx_lab.baselines.factoring import FACTORS, FactoringBaseline, MapStatistics
from attnrx_lab.baselines.gates import GatedBaseline, GatedModel, prescribe_gates
from attnrx_lab.baselines.plan import PlanBaseline
from attnrx_lab.baselines.snapvit import SnapVitBaseline
from attnrx_lab.baselines.torch_pruning import TorchPruningBaseline
from attnrx_lab.baselines.tucker import TUCKER, TUCKER_TERMS, TuckerBaseline
from attnrx_lab.baselines.unplanned import LowerResolution, UnchangedModel, VendorInt8

PRESCRIBED: Mapping[str, type[PrescribedBaseline]] = {each.name: each for each in (CorpBaseline, SnapVitBaseline)}
DECOMPOSED = (TUCKER, TUCKER_TERMS)

__all__ = [
    "DECOMPOSED",
    "FACTORS",
    "PRESCRIBED",
    "CorpBaseline",
    "DiffRateBaseline",
    "FactoringBaseline",
    "GatedBaseline",
    "GatedModel",
    "LowerResolution",
    "MapStatistics",
    "ModelCompressor",
    "PlanBaseline",
    "PrescribedBaseline",
    "SearchedBaseline",
    "SnapVitBaseline",
    "TorchPruningBaseline",
    "TuckerBaseline",
    "UnchangedModel",
    "VendorInt8",
    "prescribe_gates",
]
