"""The registry of rules by name, and the parser of rule texts."""

from collections.abc import Mapping

from attnrx.errors import InvalidInput, UnknownName
from attnrx.maps import LAYER_MAPS, MAPS, TOKENS
from attnrx.prescription import TokenPrescription
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.contribution_energy import ContributionEnergy
from attnrx.rules.effective_rank import EffectiveRank
from attnrx.rules.energy_retention import EnergyRetention
from attnrx.rules.fusion_owner import FusionOwner
from attnrx.rules.fusion_rank import FusionRank
from attnrx.rules.largest_matched import LargestMatched
from attnrx.rules.median_threshold import MedianThreshold
from attnrx.rules.norm_clip import NormClip
from attnrx.rules.parsing import parse_text, split_maps
from attnrx.rules.random_matched import RandomMatched
from attnrx.rules.remove_heads import RemoveHeads
from attnrx.rules.rule import Rule, rule_name
from attnrx.rules.shared_rank import SharedRank
from attnrx.rules.shrinkage import Shrinkage
from attnrx.rules.threshold import Threshold
from attnrx.rules.top_rank import TopRank
from attnrx.rules.total_rank import TotalRank
from attnrx.rules.uniform_heads import UniformHeads
from attnrx.rules.uniform_matched import UniformMatched
from attnrx.rules.uniform_rank import UniformRank
from attnrx.tokens import TokenPolicy, parse_policy

# Every rule by its name in text; the last three are controls, which match another rule.
RULES: Mapping[str, type[Rule]] = {
    rule_name(kind): kind
    for kind in (
        EnergyRetention,
        Threshold,
        MedianThreshold,
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

RulesLike = str | Rule | Mapping[str, str | Rule | TokenPolicy | TokenPrescription | None]
"""The rules of several maps: one text, a mapping from maps to rules or their texts, or the rule of qk alone."""


def parse_rule(text: str) -> Rule:
    """Builds a rule from text such as `energy_retention:0.90` or `threshold:0.1 & remove_heads`; see parsing.py."""
    return parse_text(text, RULES)


def parse_rules(rules: RulesLike) -> tuple[dict[str, Rule], TokenPrescription | None]:
    """Returns the rule of every map, and the token policy.

    A text looks like "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10"; a single rule applies to qk.
    """
    given = {"qk": rules} if isinstance(rules, Rule) else split_maps(rules) if isinstance(rules, str) else rules
    if not isinstance(given, Mapping):
        raise InvalidInput(f"rules={rules!r}: give a text, e.g. 'qk=total_rank:0.5', a rule, or both by map.")
    unknown = [name for name in given if name not in MAPS]
    if unknown:
        raise UnknownName("map", str(unknown[0]), MAPS)
    found: dict[str, Rule] = {}
    for name in LAYER_MAPS:
        rule = given.get(name)
        if rule is not None:
            found[name] = _rule(name, rule)
    return found, _tokens(given.get(TOKENS))


def _rule(name: str, rule: object) -> Rule:
    if isinstance(rule, str):
        return parse_rule(rule)
    if not isinstance(rule, Rule):
        raise InvalidInput(f"{name}={rule!r} is not a rule; give e.g. EnergyRetention(0.9), or its text.")
    return rule


def _tokens(policy: object) -> TokenPrescription | None:
    if policy is None or isinstance(policy, TokenPrescription):
        return policy
    read = parse_policy(policy) if isinstance(policy, str) else policy
    if not isinstance(read, TokenPolicy):
        raise InvalidInput(f"tokens={policy!r} is not a policy; give e.g. 'evit:0.7@4,7,10'.")
    return TokenPrescription.of(read)
