"""Checks as text: `accuracy,costs`, `robustness(severities=3,corruptions=common),transfer(per_class=50,seeds=0/1)`.

    checks  = check { "," check }
    check   = name [ "(" knob "=" value { "," knob "=" value } ")" ]
    value   = single { "/" single }          single = "true" | "false" | "none" | number | word

The knobs are the fields of the check that are plain values or tuples of them; other inputs have no text form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.checks.check import Check
from attnrx.errors import InvalidInput, UnknownName
from attnrx.serialization.text_parsing import KnobReader, Language, knobs_of

EXAMPLES = "accuracy,costs or accuracy,robustness(severities=3,corruptions=gaussian_noise/fog)"
LANGUAGE = Language("list of checks", "Checks", EXAMPLES, "(),=/", InvalidInput)


@dataclass(frozen=True)
class RequestedCheck:
    """The name of a check, and the knobs that differ from the defaults."""

    name: str
    knobs: Mapping[str, Any] = field(default_factory=dict)


def parse_checks_text(text: str, registry: Mapping[str, type[Check]]) -> tuple[RequestedCheck, ...]:
    """Parses the checks in a text, each given once; `registry` maps their names to classes."""
    reader = _Reader(text)
    requested = [reader.read_check(registry)]
    while reader.take(","):
        requested.append(reader.read_check(registry))
    reader.expect("end", "',' and another check, or the end")
    names = [one.name for one in requested]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the check {twice} was given twice in {text!r}; give it once, with all its knobs.")
    return tuple(requested)


class _Reader(KnobReader):
    language = LANGUAGE

    def read_check(self, registry: Mapping[str, type[Check]]) -> RequestedCheck:
        name = self.expect("name", "the name of a check")
        if name.text not in registry:
            raise UnknownName("check", name.text, registry)
        return RequestedCheck(name.text, self.read_knobs(name, knobs_of(registry[name.text])))
