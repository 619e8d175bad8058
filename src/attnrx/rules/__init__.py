"""Rules: from a diagnosis to a prescription, with reasons; rules do not access the model."""

from attnrx.rules.by_attention import RemoveHeads, UniformHeads
from attnrx.rules.by_strength import (
    ContributionEnergy,
    EffectiveRank,
    EnergyRetention,
    MedianThreshold,
    NormClip,
    Shrinkage,
    Threshold,
    TopRank,
    TotalRank,
    UniformRank,
)
from attnrx.rules.controls import CONTROLS, control_prescriptions
from attnrx.rules.decisions import score_bound
from attnrx.rules.matched import LargestMatched, RandomMatched, UniformMatched
from attnrx.rules.metrics import METRICS, rewritten
from attnrx.rules.outputs import OUTPUT_METRICS
from attnrx.rules.parsing import RULES, SHARE, RulesLike, Template, by_layer, parse_rule, parse_rules
from attnrx.rules.prescribing import prescribe_maps, require_remainder
from attnrx.rules.rule import And, ByLayer, Or, Rule, in_metric
from attnrx.rules.shared import FusionOwner, FusionRank, SharedRank

__all__ = [
    "CONTROLS",
    "METRICS",
    "OUTPUT_METRICS",
    "RULES",
    "SHARE",
    "And",
    "ByLayer",
    "ContributionEnergy",
    "EffectiveRank",
    "EnergyRetention",
    "FusionOwner",
    "FusionRank",
    "LargestMatched",
    "MedianThreshold",
    "NormClip",
    "Or",
    "RandomMatched",
    "RemoveHeads",
    "Rule",
    "RulesLike",
    "SharedRank",
    "Shrinkage",
    "Template",
    "Threshold",
    "TopRank",
    "TotalRank",
    "UniformHeads",
    "UniformMatched",
    "UniformRank",
    "by_layer",
    "control_prescriptions",
    "in_metric",
    "parse_rule",
    "parse_rules",
    "prescribe_maps",
    "require_remainder",
    "rewritten",
    "score_bound",
]
