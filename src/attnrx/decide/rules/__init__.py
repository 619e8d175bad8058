"""Pruning rules, which turn a diagnosis into a prescription with reasons, without access to the model."""

from attnrx.decide.rules.metrics import METRICS, rewritten
from attnrx.decide.rules.prescribing import OUTPUT_METRICS, prescribe_maps
from attnrx.decide.rules.rule import (
    RULES,
    And,
    ByLayer,
    EnergyRetention,
    Or,
    Rule,
    RulesLike,
    TotalRank,
    UniformRank,
    by_layer,
    in_metric,
    parse_rule,
    parse_rules,
    score_bound,
    split_maps,
)

__all__ = [
    "METRICS",
    "OUTPUT_METRICS",
    "RULES",
    "And",
    "ByLayer",
    "EnergyRetention",
    "Or",
    "Rule",
    "RulesLike",
    "TotalRank",
    "UniformRank",
    "by_layer",
    "in_metric",
    "parse_rule",
    "parse_rules",
    "prescribe_maps",
    "rewritten",
    "score_bound",
    "split_maps",
]
