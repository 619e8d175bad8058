"""Rules of the laboratory: directions that heads share (IrrAtt), and simple ones that few need.

An entry point of the group `attnrx.parts` imports this package wherever a text names a rule.
"""

from attnrx.decide.rules import register_rule
from attnrx_lab.rules.divergence import DivergenceRank, measure_divergence
from attnrx_lab.rules.heads import RemoveHeads
from attnrx_lab.rules.shared import FusionOwner, FusionRank, SharedRank
from attnrx_lab.rules.simple import ContributionEnergy, MedianThreshold, NormClip, Shrinkage, UniformHeads

__all__ = [
    "ContributionEnergy",
    "DivergenceRank",
    "FusionOwner",
    "FusionRank",
    "MedianThreshold",
    "NormClip",
    "RemoveHeads",
    "SharedRank",
    "Shrinkage",
    "UniformHeads",
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
    RemoveHeads,
):
    register_rule(_kind)
