"""Policies as text: `evit:0.7@4,7,10`, `spot(variance=false,projected=0):0.7@4,7,10`, `class_attention:0.8/0.5@4,7`,
`tome:13@every`.

    policy  = reducer ":" ( ratio { "/" ratio } "@" layer { "," layer } | number "@every" )
    reducer = name [ "(" knob "=" value { "," knob "=" value } ")" ]
    value   = "true" | "false" | "none" | number | reducer | word

One ratio is the share of the remaining patches kept at every stage; several are the shares of the image's patches that
remain after each stage. A number before @every is the reduction before every layer but the first. Invariant:
parse_policy(str(policy)) == policy.written.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from attnrx.errors import InvalidInput, UnknownName
from attnrx.serialization.text_parsing import WORDS, KnobReader, Language, Token, share
from attnrx.tokens.policy import TokenPolicy
from attnrx.tokens.reducer import Reducer

EXAMPLES = "evit:0.7@4,7,10, spot(variance=false):0.7@4,7,10, class_attention:0.8/0.5@4,7, tome:13@every"
EVERY = "every"
DEEPEST = 20  # brackets; far below the nesting that exhausts Python's stack

LANGUAGE = Language("policy", "Policies", EXAMPLES, "():,=/@", InvalidInput)


def parse_policy_text(text: str, registry: Mapping[str, type[Reducer]]) -> TokenPolicy:
    """Builds a policy from text, with the reducers of the registry."""
    if text.count("(") > DEEPEST:
        raise InvalidInput(f"a policy in text may have {DEEPEST} brackets, found {text.count('(')}.")
    return _Reader(text, registry).read_policy()


def parse_reducer_text(text: str, registry: Mapping[str, type[Reducer]]) -> Reducer:
    """Builds a reducer from text, without the stages of a policy."""
    reader = _Reader(text, registry)
    reducer = reader.read_reducer(reader.expect("name", "the name of a reducer"))
    reader.expect("end", "the end; a reducer is given here without stages")
    return reducer


class _Reader(KnobReader):
    """A recursive-descent parser; every method consumes the tokens of one grammar rule."""

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
        self.expect("@", "'@' and the layers before which tokens are pruned")
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
                number.start, f"give one number before @{EVERY}: the patches to prune before every layer"
            )
        return TokenPolicy.every_layer(reducer, int(number.text))

    def read_reducer(self, name: Token) -> Reducer:
        if name.text not in self.registry:
            raise UnknownName("token reducer", name.text, self.registry)
        kind = self.registry[name.text]
        knobs = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        given = self.read_knobs(name, {knob: field.type for knob, field in knobs.items()})
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

    def read_value(self, kinds: tuple[type, ...]) -> Any:
        """Reads a value, which may be a reducer where the field accepts one."""
        here = self.tokens[self.position]
        if here.kind == "name" and here.text not in WORDS and any(issubclass(kind, Reducer) for kind in kinds):
            return self.read_reducer(self.expect("name", "a reducer"))
        return super().read_value(kinds)

    def read_ratio(self) -> float:
        return share(self.expect("number", "a keep ratio, e.g. 0.7").text)

    def read_layer(self) -> int:
        layer = self.expect("number", "a layer, e.g. 4")
        if not layer.text.isdigit():
            raise self.problem(layer.start, f"{layer.text} is not the number of a layer")
        return int(layer.text)
