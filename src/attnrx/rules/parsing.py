"""Rules as text: parsing, and templates with an open share."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrx.errors import InvalidInput, InvalidRule, UnknownName
from attnrx.maps import MAPS, TOKENS
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.rule import And, Or, Rule, option_fields
from attnrx.serialization.text_parsing import Language, Reader, Token, share

EXAMPLES = "energy_retention:0.9, threshold:0.1 & remove_heads, random_matched(top_rank:32):seed=3"
MAP = re.compile(r"(?:^|(?<=[^\s,;:(&|])\s+)([A-Za-z_]\w*)=")
DEEPEST = 50  # brackets; far below the nesting that exhausts Python's stack

LANGUAGE = Language("rule", "Rules", EXAMPLES, "&|():,;=", InvalidRule)


def parse_text(text: str, registry: Mapping[str, type[Rule]]) -> Rule:
    """Builds a rule from text, with the rules of the registry."""
    if text.count("(") > DEEPEST:
        raise InvalidRule(f"a rule in text may have {DEEPEST} brackets, found {text.count('(')}; build it in Python.")
    reader = _Reader(text, registry)
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
    if before:
        raise InvalidRule(f"the rules {text!r} begin with {before!r}: name its map, e.g. qk={before}.")
    found: dict[str, str] = {}
    for name, rule in zip(parts[::2], parts[1::2], strict=True):
        if name not in MAPS:
            raise UnknownName("map", name, MAPS)
        if name in found or not rule.strip():
            raise InvalidRule(f"the rules {text!r}: give {name} once, as in {name}=total_rank:0.5.")
        found[name] = rule.strip()
    return found


class _Reader(Reader):
    """A recursive-descent parser; every method consumes the tokens of one grammar rule."""

    language = LANGUAGE

    def __init__(self, text: str, registry: Mapping[str, type[Rule]]):
        super().__init__(text)
        self.registry = registry

    def read_any(self) -> Rule:
        rules = [self.read_all()]
        while self.take("|"):
            rules.append(self.read_all())
        return Or(tuple(rules)) if len(rules) > 1 else rules[0]

    def read_all(self) -> Rule:
        rules = [self.read_single()]
        while self.take("&"):
            rules.append(self.read_single())
        return And(tuple(rules)) if len(rules) > 1 else rules[0]

    def read_single(self) -> Rule:
        if self.take("("):
            rule = self.read_any()
            self.expect(")", "')'")
            return rule
        name = self.expect("name", "the name of a rule")
        if name.text not in self.registry:
            raise UnknownName("rule", name.text, self.registry)
        kind = self.registry[name.text]
        given = self.read_matched(name, kind)
        if self.take(":"):
            self.read_knob(name, kind, given)
            while self.take(","):
                self.read_knob(name, kind, given)
        return self.build(name, kind, given)

    def read_matched(self, name: Token, kind: type[Rule]) -> dict[str, Any]:
        """Reads the rule in brackets that a control matches, or the rules of all layers."""
        rule_fields = [field for field in option_fields(kind) if _holds_rules(field)]
        here = self.tokens[self.position]
        if self.take("("):
            if not rule_fields:
                raise self.problem(here.start, f"{name.text} takes no rule in brackets")
            rules = [self.read_any()]
            while rule_fields[0].type is not Rule and self.take(";"):
                rules.append(self.read_any())
            self.expect(")", "')'")
            return {rule_fields[0].name: rules[0] if rule_fields[0].type is Rule else tuple(rules)}
        if rule_fields:
            what = "the rule that it matches" if rule_fields[0].type is Rule else "a rule for each layer"
            message = f"{name.text} needs {what}, as in {name.text}(energy_retention:0.9)"
            raise self.problem(here.start, message)
        return {}

    def read_knob(self, name: Token, kind: type[Rule], given: dict[str, Any]) -> None:
        """Reads one value into `given`."""
        fields = [field for field in option_fields(kind) if not _holds_rules(field)]
        knobs = {field.name: field.type for field in fields}
        here = self.tokens[self.position]
        free = [field.name for field in fields if not field.kw_only and field.name not in given]
        if self.take("name"):
            knob = here.text
            self.expect("=", f"'=' after {knob}")
        elif not free:
            has = f"has only the knobs {', '.join(knobs)}" if knobs else "has no knobs"
            raise self.problem(here.start, f"{name.text} {has}, found {here.text!r}")
        else:
            knob = free[0]
        if knob not in knobs:
            raise UnknownName(f"knob of {name.text}", knob, knobs)
        if knob in given:
            raise self.problem(here.start, f"{knob} is given twice")
        if knobs[knob] in (str, str | None):
            given[knob] = self.expect("name", f"a name for {knob}").text
        else:
            given[knob] = self.value(self.expect("number", f"a number for {knob}"), knob, knobs[knob])

    def value(self, number: Token, knob: str, kind: Any) -> int | float:
        if kind is float or (kind == int | float and not re.fullmatch(r"[-+]?\d+", number.text)):
            return share(number.text)
        if not re.fullmatch(r"[-+]?\d+", number.text):
            raise self.problem(number.start, f"{knob} is a whole number, not {number.text}")
        return int(number.text)

    def build(self, name: Token, kind: type[Rule], given: dict[str, Any]) -> Rule:
        needed = [field.name for field in option_fields(kind) if field.default is dataclasses.MISSING]
        missing = [name for name in needed if name not in given]
        if missing:
            message = f"{name.text} needs {' and '.join(missing)}, as in {name.text}:{missing[0]}=..."
            raise self.problem(name.start, message)
        return kind(**given)


def _holds_rules(field: "dataclasses.Field[Any]") -> bool:
    return field.type in (Rule, tuple[Rule, ...])


SHARE = "{share}"


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
