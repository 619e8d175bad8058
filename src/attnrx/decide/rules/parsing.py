"""The registry of rules by name, rules as text, and templates with an open share."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrx.decide.rules.by_attention import RemoveHeads, UniformHeads
from attnrx.decide.rules.by_strength import (
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
from attnrx.decide.rules.matched import LargestMatched, RandomMatched, UniformMatched
from attnrx.decide.rules.rule import And, ByLayer, Or, Rule, option_fields, rule_name
from attnrx.decide.rules.shared import FusionOwner, FusionRank, SharedRank
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.errors import InvalidInput, InvalidRule, UnknownName
from attnrx.support.text_parsing import Language, TextReader, Token, share
from attnrx.vit.maps import LAYER_MAPS, MAPS, TOKENS
from attnrx.vit.tokens import TokenPolicy, parse_policy

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

EXAMPLES = "energy_retention:0.9, threshold:0.1 & remove_heads, random_matched(top_rank:32):seed=3"
# The name of a map starts the text, or follows a space after a complete rule. After one of , ; : ( & | the name before
# "=" is that of a knob.
MAP = re.compile(r"(?:^|(?<=[^\s,;:(&|])\s+)([A-Za-z_]\w*)=")
DEEPEST = 50  # brackets; far below the nesting that exhausts Python's stack
SHARE = "{share}"


def parse_rule(text: str) -> Rule:
    """Builds a rule from text such as `energy_retention:0.90` or `threshold:0.1 & remove_heads`."""
    if text.count("(") > DEEPEST:
        raise InvalidRule(f"a rule in text may have {DEEPEST} brackets, found {text.count('(')}; build it in Python.")
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
    before, *parts = MAP.split(text.strip())
    if not parts:
        return {"qk": before} if before else {}
    names, rules = parts[::2], [rule.strip() for rule in parts[1::2]]
    for name in names:
        _require_map(name)
    if before or len(set(names)) < len(names) or not all(rules):
        raise InvalidRule(f"the rules {text!r}: give every map once with its rule, as in qk=total_rank:0.5.")
    return dict(zip(names, rules, strict=True))


def _require_map(name: str) -> None:
    if name not in MAPS:
        raise UnknownName("map", name, MAPS)


def parse_rules(rules: RulesLike) -> tuple[dict[str, Rule], TokenPrescription | None]:
    """Returns the rule of every map, and the token policy.

    A text looks like "qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10"; a single rule applies to qk.
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
    return rules_by_map, TokenPrescription.of(policy) if isinstance(policy, TokenPolicy) else policy


class _Reader(TextReader):
    """A recursive-descent parser; every method consumes the tokens of one grammar rule."""

    #   any    = all { "|" all }
    #   all    = single { "&" single }
    #   single = "(" any ")" | name [ "(" any { ";" any } ")" ] [ ":" knob { "," knob } ]
    #   knob   = [ name "=" ] ( number | name )
    language = Language("rule", "Rules", EXAMPLES, "&|():,;=", InvalidRule)

    def read_any(self) -> Rule:
        rules = [self._read_all()]
        while self.take("|"):
            rules.append(self._read_all())
        return Or(tuple(rules)) if len(rules) > 1 else rules[0]

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
        name = self.expect("name", "the name of a rule")
        if name.text not in RULES:
            raise UnknownName("rule", name.text, RULES)
        kind = RULES[name.text]
        values = self._read_inner(kind)
        if self.take(":"):
            self._read_knob(name, kind, values)
            while self.take(","):
                self._read_knob(name, kind, values)
        missing = [
            field.name
            for field in option_fields(kind)
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            message = f"{name.text} needs {' and '.join(missing)}, as in {name.text}:{missing[0]}=..."
            raise self.problem(name.start, message)
        return kind(**values)

    def _read_inner(self, kind: type[Rule]) -> dict[str, Any]:
        """Reads the rule in brackets that a control matches, or the rules of all layers."""
        first = option_fields(kind)[0]
        if not _holds_rules(first):
            return {}
        example = f"a rule in brackets, as in {rule_name(kind)}(energy_retention:0.9)"
        self.expect("(", example)
        rules = [self.read_any()]
        while first.type is not Rule and self.take(";"):
            rules.append(self.read_any())
        self.expect(")", "')'")
        return {first.name: rules[0] if first.type is Rule else tuple(rules)}

    def _read_knob(self, name: Token, kind: type[Rule], given: dict[str, Any]) -> None:
        """Reads one value into `given`."""
        knobs = {field.name: field for field in option_fields(kind) if not _holds_rules(field)}
        token = self.tokens[self.position]
        # A value without a name is that of the first knob without a value; keyword-only ones (metric) need a name.
        free = [knob for knob, field in knobs.items() if not field.kw_only and knob not in given]
        if self.take("name"):
            knob = token.text
            self.expect("=", f"'=' after {knob}")
        elif free:
            knob = free[0]
        else:
            raise self.problem(token.start, f"{name.text} has only the knobs {', '.join(knobs)}, found {token.text!r}")
        if knob not in knobs:
            raise UnknownName(f"knob of {name.text}", knob, knobs)
        if knob in given:
            raise self.problem(token.start, f"{knob} is given twice")
        if knobs[knob].type in (str, str | None):
            given[knob] = self.expect("name", f"a name for {knob}").text
            return
        number = self.expect("number", f"a number for {knob}")
        is_whole = re.fullmatch(r"[-+]?\d+", number.text) is not None
        if not is_whole and knobs[knob].type is int:
            raise self.problem(number.start, f"{knob} is a whole number, not {number.text}")
        # "1" is a number of directions where both are accepted, and "1.0" or "100%" a share (`rank_among`).
        given[knob] = int(number.text) if is_whole and knobs[knob].type is not float else share(number.text)


def _holds_rules(field: "dataclasses.Field[Any]") -> bool:
    return field.type in (Rule, tuple[Rule, ...])


@dataclass(frozen=True)
class Template:
    """The rule texts by map, with the placeholder {share} for one common share.

    For example "qk=total_rank:{share} fc1=uniform_rank:{share}".
    """

    texts: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parses the rules of several maps from one text."""
        return cls(split_maps(text))

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.texts.items())

    @property
    def has_token_share(self) -> bool:
        """Whether the share also applies to the tokens."""
        return SHARE in self.texts.get(TOKENS, "")

    @property
    def varies(self) -> bool:
        """Whether any rule depends on the share."""
        return any(SHARE in text for text in self.texts.values())

    def require_varying(self) -> None:
        """Raises InvalidInput if no rule depends on the share."""
        if not self.varies:
            raise InvalidInput(
                f"{str(self) or 'no rule'} has no share to choose: write {SHARE}, e.g. qk=total_rank:{SHARE}."
            )

    def at(self, share: float) -> dict[str, str]:
        """Returns the texts with one share inserted."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Returns one rule from the rules of all layers: that rule itself if all are equal, else a ByLayer."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
