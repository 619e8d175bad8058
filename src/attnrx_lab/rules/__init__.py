"""Pruning rules from papers: SVDA's rules, IrrAtt's rules for shared directions, controls, and rarely needed rules.

attnrx imports this package through the entry points of the group `attnrx.parts`. The import happens when you name a
rule or a loss as text, or when you diagnose a model.
"""

from attnrx.decide.diagnostics import DIAGNOSTICS
from attnrx.decide.rules import RULES
from attnrx_lab import perturbation, shared_attention, svda_attention  # noqa: F401  (they register losses and forms)
from attnrx_lab.redundancy import Indicators, Redundancy
from attnrx_lab.rules.controls import CONTROLS, control_prescriptions
from attnrx_lab.rules.divergence import DivergenceRank, measure_divergence
from attnrx_lab.rules.matched import LargestMatched, RandomMatched, UniformMatched
from attnrx_lab.rules.shared import FusionOwner, FusionRank, JointMoments, SharedRank
from attnrx_lab.rules.simple import ContributionEnergy, MedianThreshold, NormClip, Shrinkage, UniformHeads
from attnrx_lab.rules.svda import EffectiveRank, RemoveHeads, Threshold, TopRank

__all__ = [
    "CONTROLS",
    "ContributionEnergy",
    "DivergenceRank",
    "EffectiveRank",
    "FusionOwner",
    "FusionRank",
    "JointMoments",
    "LargestMatched",
    "MedianThreshold",
    "NormClip",
    "RandomMatched",
    "RemoveHeads",
    "SharedRank",
    "Shrinkage",
    "Threshold",
    "TopRank",
    "UniformHeads",
    "UniformMatched",
    "control_prescriptions",
    "measure_divergence",
]

for _kind in (
    DivergenceRank,
    FusionRank,
    FusionOwner,
    SharedRank,
    MedianThreshold,
    ContributionEnergy,
    Shrinkage,
    NormClip,
    UniformHeads,
    EffectiveRank,
    RemoveHeads,
    Threshold,
    TopRank,
    LargestMatched,
    RandomMatched,
    UniformMatched,
):
    RULES.register(_kind)

DIAGNOSTICS.register(Redundancy)  # `remove_heads` uses its similarities
DIAGNOSTICS.register(Indicators)
