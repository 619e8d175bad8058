"""Policies as text: `evit:0.7@4,7,10`, `spot(variance=false,projected=0):0.7@4,7,10`, `class_attention:0.8/0.5@4,7`,
`tome:13@every`.

    policy  = reducer ":" ( ratio { "/" ratio } "@" layer { "," layer } | number "@every" )
    reducer = name [ "(" knob "=" value { "," knob "=" value } ")" ]
    value   = "true" | "false" | "none" | number | reducer | word

One ratio is what is kept of the patches that are left at every stage, several are the shares of the image's patches
that are left after each. A number before @every is how many patches leave before every layer but the first. The law:
parse_policy(str(policy)) == policy.written.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, get_args

from attnrx.errors import InvalidInput, UnknownName
from attnrx.reading import Language, Reader, Token
from attnrx.tokens.policy import TokenPolicy
from attnrx.tokens.reducer import Reducer

EXAMPLES = "evit:0.7@4,7,10, spot(variance=false):0.7@4,7,10, class_attention:0.8/0.5@4,7, tome:13@every"
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
EVERY = "every"
DEEPEST = 20  # brackets, far from where nesting would exhaust Python's stack

LANGUAGE = Language("policy", "Policies", EXAMPLES, "():,=/@", InvalidInput)


def parse_policy_text(text: str, registry: Mapping[str, type[Reducer]]) -> TokenPolicy:
    """Builds the policy that a text describes from the reducers of the registry."""
    if text.count("(") > DEEPEST:
        raise InvalidInput(f"a policy in text may have {DEEPEST} brackets, found {text.count('(')}.")
    return _Reader(text, registry).read_policy()


class _Reader(Reader):
    """Reads tokens from left to right; every method takes the tokens of its part of the grammar."""

    language = LANGUAGE

    def __init__(self, text: str, registry: Mapping[str, type[Reducer]]):
        super().__init__(text)
        self.registry = registry

    def read_policy(self) -> TokenPolicy:
        reducer = self.read_reducer(self.expect("name", "the name of a reducer"))
        self.expect(":", "':' and the keep ratio")
        first = self.tokens[self.position]
        ratios = [self.read_ratio()]
        while self.take("/"):
            ratios.append(self.read_ratio())
        self.expect("@", "'@' and the layers before which tokens leave")
        if self.tokens[self.position].text == EVERY:
            return self.read_every(reducer, first, len(ratios))
        layers = [self.read_layer()]
        while self.take(","):
            layers.append(self.read_layer())
        self.expect("end", "the end")
        if len(ratios) == 1:
            return TokenPolicy.staged(reducer, ratios[0], tuple(layers))
        return TokenPolicy(reducer, tuple(layers), tuple(ratios))

    def read_every(self, reducer: Reducer, number: Token, given: int) -> TokenPolicy:
        self.expect("name", EVERY)
        self.expect("end", "the end")
        if given > 1 or not number.text.isdigit() or int(number.text) < 1:
            raise self.problem(
                number.start, f"before @{EVERY} stands one number, of the patches that leave before every layer"
            )
        return TokenPolicy.every_layer(reducer, int(number.text))

    def read_reducer(self, name: Token) -> Reducer:
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
            raise self.problem(name.start, f"{name.text} needs {' and '.join(missing)}")
        return kind(**given)

    def read_knob(self, name: Token, knobs: Mapping[str, Any], given: dict[str, Any]) -> None:
        knob = self.expect("name", f"a knob of {name.text}")
        if not knobs:
            raise self.problem(knob.start, f"{name.text} has no knobs")
        if knob.text not in knobs:
            raise UnknownName(f"knob of {name.text}", knob.text, knobs)
        if knob.text in given:
            raise self.problem(knob.start, f"{knob.text} is given twice")
        self.expect("=", f"'=' after {knob.text}")
        here, kinds = self.tokens[self.position], _kinds(knobs[knob.text].type)
        value = self.read_value(kinds)
        if not _is_of(value, kinds):
            wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
            raise self.problem(here.start, f"{knob.text} of {name.text} is {wanted}, not {here.text}")
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
            raise self.problem(layer.start, f"{layer.text} is not the number of a layer")
        return int(layer.text)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Gives the types that a knob may have."""
    return get_args(annotation) or (annotation,)


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
