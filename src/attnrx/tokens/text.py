"""Policies as text: `evit:0.7@4,7,10`, `spot(variance=false,projected=0):0.7@4,7,10`, `class_attention:0.8/0.5@4,7`.

    policy  = reducer ":" ratio { "/" ratio } "@" layer { "," layer }
    reducer = name [ "(" knob "=" value { "," knob "=" value } ")" ]
    value   = "true" | "false" | "none" | number | reducer | word

One ratio is what is kept of the patches that are left at every stage, several are the shares of the image's patches
that are left after each. The law: parse_policy(str(policy)) == policy.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from attnrx.errors import InvalidInput, UnknownName
from attnrx.tokens.policy import TokenPolicy
from attnrx.tokens.reducer import Reducer

EXAMPLES = "evit:0.7@4,7,10, spot(variance=false):0.7@4,7,10, class_attention:0.8/0.5@4,7"
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
DEEPEST = 20  # brackets, far from where nesting would exhaust Python's stack

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])|(?P<name>[A-Za-z_]\w*)|(?P<sign>[():,=/@]))"
)


def parse_policy_text(text: str, registry: Mapping[str, type[Reducer]]) -> TokenPolicy:
    """Builds the policy that a text describes from the reducers of the registry."""
    if text.count("(") > DEEPEST:
        raise InvalidInput(f"a policy in text may have {DEEPEST} brackets, found {text.count('(')}.")
    return _Reader(text, tuple(_tokens(text)), registry).read_policy()


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int


def _tokens(text: str) -> Iterator[_Token]:
    end, position = len(text.rstrip()), 0
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise _error(text, position, f"{text[position:].split()[0]!r} cannot be read")
        kind, said = match.lastgroup, match.group(match.lastgroup)
        yield _Token(said if kind == "sign" else kind, said, match.start(kind))
        position = match.end()
    yield _Token("end", "the end", end)


class _Reader:
    """Reads tokens from left to right; every method takes the tokens of its part of the grammar."""

    def __init__(self, text: str, tokens: tuple[_Token, ...], registry: Mapping[str, type[Reducer]]):
        self.text, self.tokens, self.registry = text, tokens, registry
        self.position = 0

    def read_policy(self) -> TokenPolicy:
        reducer = self.read_reducer(self.expect("name", "the name of a reducer"))
        self.expect(":", "':' and the keep ratio")
        ratios = [self.read_ratio()]
        while self.take("/"):
            ratios.append(self.read_ratio())
        self.expect("@", "'@' and the layers before which tokens leave")
        layers = [self.read_layer()]
        while self.take(","):
            layers.append(self.read_layer())
        self.expect("end", "the end")
        if len(ratios) == 1:
            return TokenPolicy.staged(reducer, ratios[0], tuple(layers))
        return TokenPolicy(reducer, tuple(layers), tuple(ratios))

    def read_reducer(self, name: _Token) -> Reducer:
        if name.text not in self.registry:
            raise UnknownName("token reducer", name.text, self.registry)
        kind = self.registry[name.text]
        knobs = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        given: dict[str, Any] = {}
        if self.take("("):
            self.read_knob(name, knobs, given)
            while self.take(","):
                self.read_knob(name, knobs, given)
            self.expect(")", "')'")
        missing = [
            knob
            for knob, field in knobs.items()
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and knob not in given
        ]
        if missing:
            raise _error(self.text, name.start, f"{name.text} needs {' and '.join(missing)}")
        return kind(**given)

    def read_knob(self, name: _Token, knobs: Mapping[str, Any], given: dict[str, Any]) -> None:
        knob = self.expect("name", f"a knob of {name.text}")
        if not knobs:
            raise _error(self.text, knob.start, f"{name.text} has no knobs")
        if knob.text not in knobs:
            raise UnknownName(f"knob of {name.text}", knob.text, knobs)
        if knob.text in given:
            raise _error(self.text, knob.start, f"{knob.text} is given twice")
        self.expect("=", f"'=' after {knob.text}")
        here, kinds = self.tokens[self.position], _kinds(knobs[knob.text].type)
        value = self.read_value(kinds)
        if not _is_of(value, kinds):
            wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
            raise _error(self.text, here.start, f"{knob.text} of {name.text} is {wanted}, not {here.text}")
        given[knob.text] = float(value) if isinstance(value, int) and float in kinds and int not in kinds else value

    def read_value(self, kinds: tuple[type, ...]) -> Any:
        here = self.tokens[self.position]
        if self.take("number"):
            return int(here.text) if re.fullmatch(r"[-+]?\d+", here.text) else float(here.text)
        word = self.expect("name", "a value: a number, true, false, none or a name")
        if any(issubclass(kind, Reducer) for kind in kinds) and word.text not in WORDS:
            return self.read_reducer(word)
        return WORDS.get(word.text, word.text)

    def read_ratio(self) -> float:
        return float(self.expect("number", "a keep ratio, e.g. 0.7").text)

    def read_layer(self) -> int:
        layer = self.expect("number", "a layer, e.g. 4")
        if not layer.text.isdigit():
            raise _error(self.text, layer.start, f"{layer.text} is not the number of a layer")
        return int(layer.text)

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


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Gives the types that a knob may have."""
    return get_args(annotation) or (annotation,)


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def _error(text: str, start: int, problem: str) -> InvalidInput:
    return InvalidInput(f"the policy {text!r}, at character {start + 1}: {problem}. Policies read like {EXAMPLES}.")
