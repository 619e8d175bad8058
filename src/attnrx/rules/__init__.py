"""Rules: from a diagnosis to a prescription, with reasons; rules do not access the model."""

from attnrx.rules.by_layer import ByLayer
from attnrx.rules.contribution_energy import ContributionEnergy
from attnrx.rules.controls import CONTROLS, control_prescriptions
from attnrx.rules.decisions import score_bound
from attnrx.rules.effective_rank import EffectiveRank
from attnrx.rules.energy_retention import EnergyRetention
from attnrx.rules.fusion_owner import FusionOwner
from attnrx.rules.fusion_rank import FusionRank
from attnrx.rules.largest_matched import LargestMatched
from attnrx.rules.median_threshold import MedianThreshold
from attnrx.rules.metrics import METRICS, OWN, rewritten
from attnrx.rules.norm_clip import NormClip
from attnrx.rules.outputs import OUTPUT_METRICS
from attnrx.rules.parsing import SHARE, Template, by_layer
from attnrx.rules.prescribing import prescribe_maps
from attnrx.rules.random_matched import RandomMatched
from attnrx.rules.registry import RULES, RulesLike, parse_rule, parse_rules
from attnrx.rules.remove_heads import RemoveHeads
from attnrx.rules.rule import And, Or, Rule, in_metric, readings_needed
from attnrx.rules.shared_rank import SharedRank
from attnrx.rules.shrinkage import Shrinkage
from attnrx.rules.threshold import Threshold
from attnrx.rules.top_rank import TopRank
from attnrx.rules.total_rank import TotalRank
from attnrx.rules.uniform_heads import UniformHeads
from attnrx.rules.uniform_matched import UniformMatched
from attnrx.rules.uniform_rank import UniformRank

__all__ = [
    "CONTROLS",
    "METRICS",
    "OUTPUT_METRICS",
    "OWN",
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
    "readings_needed",
    "rewritten",
    "score_bound",
]
