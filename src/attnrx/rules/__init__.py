"""Rules: a diagnosis in; which directions and heads stay, at what strength and why, out. They see no model."""

from collections.abc import Mapping

from attnrx.rules.bounds import score_bound
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.contribution_energy import ContributionEnergy
from attnrx.rules.controls import CONTROLS, control_prescriptions
from attnrx.rules.effective_rank import EffectiveRank
from attnrx.rules.energy_retention import EnergyRetention
from attnrx.rules.fusion_owner import FusionOwner
from attnrx.rules.fusion_rank import FusionRank
from attnrx.rules.largest_matched import LargestMatched
from attnrx.rules.metrics import METRICS, OWN
from attnrx.rules.norm_clip import NormClip
from attnrx.rules.outputs import OUTPUT_METRICS
from attnrx.rules.parsing import parse_text
from attnrx.rules.prescribing import prescribe
from attnrx.rules.random_matched import RandomMatched
from attnrx.rules.remove_heads import RemoveHeads
from attnrx.rules.rewriting import rewritten
from attnrx.rules.rule import And, Or, Rule, readings_needed, rule_name
from attnrx.rules.shared_rank import SharedRank
from attnrx.rules.shrinkage import Shrinkage
from attnrx.rules.template import SHARE, Template, by_layer
from attnrx.rules.threshold import Threshold
from attnrx.rules.top_rank import TopRank
from attnrx.rules.total_rank import TotalRank
from attnrx.rules.uniform_heads import UniformHeads
from attnrx.rules.uniform_matched import UniformMatched
from attnrx.rules.uniform_rank import UniformRank

# Every rule by its name in text; the last three are controls, which match another rule.
RULES: Mapping[str, type[Rule]] = {
    rule_name(kind): kind
    for kind in (
        EnergyRetention,
        Threshold,
        TopRank,
        TotalRank,
        UniformRank,
        FusionRank,
        FusionOwner,
        SharedRank,
        EffectiveRank,
        ContributionEnergy,
        Shrinkage,
        NormClip,
        UniformHeads,
        RemoveHeads,
        ByLayer,
        RandomMatched,
        LargestMatched,
        UniformMatched,
    )
}

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
    "NormClip",
    "Or",
    "RandomMatched",
    "RemoveHeads",
    "Rule",
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
    "parse_rule",
    "prescribe",
    "readings_needed",
    "rewritten",
    "score_bound",
]


def parse_rule(text: str) -> Rule:
    """Builds a rule from text such as `energy_retention:0.90` or `threshold:0.1 & remove_heads`; see parsing.py."""
    return parse_text(text, RULES)
