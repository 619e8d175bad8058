"""The registry of rules by name, and rules as text."""

from collections.abc import Mapping, Sequence

from attnrx.decide.rules.rule import And, ByLayer, EnergyRetention, Or, Rule, TotalRank, UniformRank
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.errors import InvalidInput, InvalidRule, UnknownName
from attnrx.support.text_parsing import Registry, TextReader, split_named
from attnrx.vit.maps import LAYER_MAPS, MAPS, TOKENS
from attnrx.vit.tokens import TokenPolicy, parse_policy

# The rules by their names in texts; those of papers and matched controls are registered by the laboratory.
RULES = Registry[Rule]("rule", EnergyRetention, TotalRank, UniformRank, ByLayer)
register_rule, known_rules = RULES.register, RULES.known

RulesLike = str | Rule | Mapping[str, str | Rule | TokenPolicy | TokenPrescription | None]
"""The rules of several maps: one text, a mapping from maps to rules or their texts, or the rule of qk alone."""

EXAMPLES = "energy_retention:0.9, threshold:0.1 & remove_heads, random_matched(top_rank:32):seed=3"


def parse_rule(text: str) -> Rule:
    """Builds a rule from text such as `energy_retention:0.90` or `threshold:0.1 & remove_heads`."""
    reader = _Reader(text)
    rule = reader.read_any()
    reader.expect("end", "'&', '|' or the end")
    return rule


def split_maps(text: str) -> dict[str, str]:
    """Returns the text of every map's rule, from e.g. "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10".

    A text without a map is the rule of qk.

    Raises:
        InvalidRule: A map is given twice or without a rule.
        UnknownName: A map does not exist.
    """
    before, parts = split_named(text)
    if not parts:
        return {"qk": before} if before else {}
    for name, _ in parts:
        _require_map(name)
    rules = dict(parts)
    if before or len(rules) < len(parts) or not all(rules.values()):
        raise InvalidRule(f"the rules {text!r}: give every map once with its rule, as in qk=total_rank:0.5.")
    return rules


def _require_map(name: str) -> None:
    if name not in MAPS:
        raise UnknownName("map", name, MAPS)


def parse_rules(rules: RulesLike) -> tuple[dict[str, Rule], TokenPrescription | None]:
    """Returns the rule of every map, and the token policy.

    A text looks like "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10"; a single rule applies to qk.

    Raises:
        InvalidInput: The rules are neither a text, a rule nor a mapping of maps to rules and a token policy.
        UnknownName: There is no such map.
    """
    values_by_map = {"qk": rules} if isinstance(rules, Rule) else split_maps(rules) if isinstance(rules, str) else rules
    if not isinstance(values_by_map, Mapping):
        raise InvalidInput(f"rules={rules!r}: give a text, e.g. 'qk=total_rank:0.5', a rule, or both by map.")
    for name in values_by_map:
        _require_map(str(name))
    rules_by_map: dict[str, Rule] = {}
    for name in LAYER_MAPS:  # one order of the maps, whatever the order of the text
        rule = values_by_map.get(name)
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        if isinstance(rule, Rule):
            rules_by_map[name] = rule
        elif rule is not None:
            raise InvalidInput(f"{name}={rule!r} is not a rule; give e.g. EnergyRetention(0.9), or its text.")
    policy = values_by_map.get(TOKENS)
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    if policy is not None and not isinstance(policy, TokenPolicy | TokenPrescription):
        raise InvalidInput(f"tokens={policy!r} is not a policy; give e.g. 'evit:0.7@4,7,10'.")
    return rules_by_map, TokenPrescription(policy) if isinstance(policy, TokenPolicy) else policy


class _Reader(TextReader):
    """Reads rules; every method consumes the tokens of one rule of the grammar."""

    #   any    = all { "|" all }
    #   all    = single { "&" single }
    #   single = "(" any ")" | call, in which the knobs of controls and `by_layer` are rules
    noun, plural, examples, signs, error = "rule", "Rules", EXAMPLES, "&|():,;=", InvalidRule
    nested = Rule

    def read_any(self) -> Rule:
        rules = [self._read_all()]
        while self.take("|"):
            rules.append(self._read_all())
        return Or(tuple(rules)) if len(rules) > 1 else rules[0]

    read_nested = read_any

    def _read_all(self) -> Rule:
        rules = [self._read_single()]
        while self.take("&"):
            rules.append(self._read_single())
        return And(tuple(rules)) if len(rules) > 1 else rules[0]

    def _read_single(self) -> Rule:
        if self.take("("):
            rule = self.read_any()
            self.expect(")", "')'")
            return rule
        name, kind = self.read_name(known_rules(), "rule")
        return self.build(name, kind, self.read_knobs(name, kind, is_short=True))


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Returns one rule from the rules of all layers: that rule itself if all are equal, else a ByLayer."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
