"""Rules as text: `energy_retention:0.90`, `threshold:0.1 & remove_heads`, `random_matched(top_rank:32):seed=3`.

    rule    = all { "|" all }              all   = single { "&" single }
    single  = "(" rule ")" | name [ "(" rule { ";" rule } ")" ] [ ":" knob { "," knob } ]
    knob    = [ name "=" ] number

Numbers without a name fill the knobs in their order. The law: parse_rule(str(rule)) == rule.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attnrx.errors import InvalidRule, UnknownName
from attnrx.rules.rule import And, Or, Rule

EXAMPLES = "energy_retention:0.9, threshold:0.1 & remove_heads, random_matched(top_rank:32):seed=3"
DEEPEST = 50  # brackets, far from where nesting would exhaust Python's stack

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])|(?P<name>[A-Za-z_]\w*)|(?P<sign>[&|():,;=]))"
)


def parse_text(text: str, registry: Mapping[str, type[Rule]]) -> Rule:
    """Builds the rule that a text describes from the rules of the registry."""
    if text.count("(") > DEEPEST:
        raise InvalidRule(f"a rule in text may have {DEEPEST} brackets, found {text.count('(')}; build it in Python.")
    reader = _Reader(text, tuple(_tokens(text)), registry)
    rule = reader.read_any()
    reader.expect("end", "'&', '|' or the end")
    return rule


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


def _tokens(text: str) -> Iterator[_Token]:
    end = len(text.rstrip())
    position = 0
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            start = position + len(text[position:]) - len(text[position:].lstrip())
            raise _error(text, start, f"{text[start:].split()[0]!r} cannot be read")
        kind, said = match.lastgroup, match.group(match.lastgroup)
        yield _Token(said if kind == "sign" else kind, said, match.start(kind))
        position = match.end()
    yield _Token("end", "the end", end)


class _Reader:
    """Reads tokens from left to right; every method takes the tokens of its part of the grammar."""

    def __init__(self, text: str, tokens: tuple[_Token, ...], registry: Mapping[str, type[Rule]]):
        self.text, self.tokens, self.registry = text, tokens, registry
        self.position = 0

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

    def read_matched(self, name: _Token, kind: type[Rule]) -> dict[str, Any]:
        """Reads the rule in brackets that a control matches, or the rules of all layers."""
        wraps = [field for field in dataclasses.fields(kind) if _holds_rules(field)]  # type: ignore[arg-type]
        here = self.tokens[self.position]
        if self.take("("):
            if not wraps:
                raise _error(self.text, here.start, f"{name.text} takes no rule in brackets")
            matched = [self.read_any()]
            while wraps[0].type is not Rule and self.take(";"):
                matched.append(self.read_any())
            self.expect(")", "')'")
            return {wraps[0].name: matched[0] if wraps[0].type is Rule else tuple(matched)}
        if wraps:
            what = "the rule that it matches" if wraps[0].type is Rule else "a rule for each layer"
            wanted = f"{name.text} needs {what}, as in {name.text}(energy_retention:0.9)"
            raise _error(self.text, here.start, wanted)
        return {}

    def read_knob(self, name: _Token, kind: type[Rule], given: dict[str, Any]) -> None:
        """Reads one value into `given`."""
        knobs = {field.name: field.type for field in dataclasses.fields(kind) if not _holds_rules(field)}  # type: ignore[arg-type]
        here = self.tokens[self.position]
        free = [knob for knob in knobs if knob not in given]
        if self.take("name"):
            knob = here.text
            self.expect("=", f"'=' after {knob}")
        elif not free:
            has = f"has only the knobs {', '.join(knobs)}" if knobs else "has no knobs"
            raise _error(self.text, here.start, f"{name.text} {has}, found {here.text!r}")
        else:
            knob = free[0]
        if knob not in knobs:
            raise UnknownName(f"knob of {name.text}", knob, knobs)
        if knob in given:
            raise _error(self.text, here.start, f"{knob} is given twice")
        if knobs[knob] is str:
            given[knob] = self.expect("name", f"a name for {knob}").text
        else:
            given[knob] = self.value(self.expect("number", f"a number for {knob}"), knob, knobs[knob])

    def value(self, number: _Token, knob: str, kind: Any) -> int | float:
        if kind is float or (kind == int | float and not re.fullmatch(r"[-+]?\d+", number.text)):
            return float(number.text)
        if not re.fullmatch(r"[-+]?\d+", number.text):
            raise _error(self.text, number.start, f"{knob} is a whole number, not {number.text}")
        return int(number.text)

    def build(self, name: _Token, kind: type[Rule], given: dict[str, Any]) -> Rule:
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        missing = [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in given]
        if missing:
            raise _error(
                self.text, name.start, f"{name.text} needs {' and '.join(missing)}, as in {name.text}:{missing[0]}=..."
            )
        return kind(**given)

    def take(self, kind: str) -> bool:
        """Takes the next token if it is of this kind."""
        found = self.tokens[self.position].kind == kind
        self.position += found
        return found

    def expect(self, kind: str, wanted: str) -> _Token:
        """Takes the next token, which must be of this kind."""
        token = self.tokens[self.position]
        if not self.take(kind):
            raise _error(self.text, token.start, f"expected {wanted}, found {token.text!r}")
        return token


def _holds_rules(field: "dataclasses.Field[Any]") -> bool:
    return field.type in (Rule, tuple[Rule, ...])


def _error(text: str, start: int, problem: str) -> InvalidRule:
    return InvalidRule(f"the rule {text!r}, at character {start + 1}: {problem}. Rules read like {EXAMPLES}.")
