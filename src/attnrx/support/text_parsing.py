"""Tokenizer and recursive-descent reader for the small languages of rules, token policies and checks."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin

from attnrx.support.errors import InvalidInput, UnknownName

LONGEST_NUMBER = 40  # characters; int() of thousands of digits is slow, and limited by Python
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}


def share(text: str) -> float:
    """Parses a number, where `50%` is 0.5; raises ValueError for other text."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


@dataclass(frozen=True)
class Token:
    """A lexical token; its kind is "number", "name", "end" or the sign itself."""

    kind: str
    text: str
    start: int


@dataclass(frozen=True)
class Language:
    """A language: its noun for messages, examples, the signs between numbers and names, and the error class."""

    noun: str
    plural: str
    examples: str
    signs: str
    error: type[InvalidInput]


class TextReader:
    """Recursive-descent reader of a text; the methods of subclasses consume the tokens of their rule."""

    language: ClassVar[Language]

    def __init__(self, text: str):
        self.text, self.position = text, 0
        self.tokens = tuple(self._split())

    def _split(self) -> Iterator[Token]:
        """Yields the tokens; raises the language's error for unreadable characters."""
        # A number must not be followed by a letter or a dot, so that 0.5x or 1.2.3 are errors and not two tokens. A
        # sign is read as part of a number.
        pattern = re.compile(
            r"\s*(?:(?P<number>[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?%?)(?![\w.])|(?P<name>[A-Za-z_]\w*)"
            rf"|(?P<sign>[{re.escape(self.language.signs)}]))"
        )
        end, position = len(self.text.rstrip()), 0
        while position < end:
            match = pattern.match(self.text, position)
            if match is None or match.lastgroup is None:
                rest = self.text[position:].lstrip()
                raise self.problem(len(self.text) - len(rest), f"{rest.split()[0]!r} cannot be read")
            kind, word = match.lastgroup, match.group(match.lastgroup)
            if kind == "number" and len(word) > LONGEST_NUMBER:
                raise self.problem(match.start(kind), f"a number of {len(word)} characters is too long")
            yield Token(word if kind == "sign" else kind, word, match.start(kind))
            position = match.end()
        yield Token("end", "the end", end)

    def take(self, kind: str) -> bool:
        """Consumes the next token if it is of this kind; returns whether it did."""
        matches = self.tokens[self.position].kind == kind
        self.position += matches
        return matches

    def expect(self, kind: str, wanted: str) -> Token:
        """Consumes the next token, which must be of this kind, and returns it."""
        token = self.tokens[self.position]
        if not self.take(kind):
            raise self.problem(token.start, f"expected {wanted}, found {token.text!r}")
        return token

    def problem(self, start: int, problem: str) -> InvalidInput:
        """Returns the error with the position of the problem and examples of valid texts."""
        noun, plural, examples = self.language.noun, self.language.plural, self.language.examples
        return self.language.error(
            f"the {noun} {self.text!r}, at character {start + 1}: {problem}. {plural} read like {examples}."
        )


Kinds = tuple[type, ...]  # the allowed types of a value


class KnobReader(TextReader):
    """Reads knobs in brackets, `(knob=value,knob=value)`, for the fields of a dataclass."""

    def read_knobs(self, name: Token, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the knobs of the named part, if any are given; `knobs` maps their names to annotations."""
        given: dict[str, Any] = {}
        if self.take("("):
            self._read_knob(name, knobs, given)
            while self.take(","):
                self._read_knob(name, knobs, given)
            self.expect(")", "')'")
        return given

    def read_value(self, kinds: Kinds) -> Any:
        """Reads one value: a number, true, false, none or a word."""
        token = self.tokens[self.position]
        if self.take("number"):
            return int(token.text) if re.fullmatch(r"[-+]?\d+", token.text) else share(token.text)
        word = self.expect("name", "a value: a number, true, false, none or a name")
        return WORDS.get(word.text, word.text)

    def _read_knob(self, name: Token, knobs: Mapping[str, Any], given: dict[str, Any]) -> None:
        knob = self.expect("name", f"a knob of {name.text}")
        if not knobs:
            raise self.problem(knob.start, f"{name.text} has no knobs")
        if knob.text not in knobs:
            raise UnknownName(f"knob of {name.text}", knob.text, knobs)
        if knob.text in given:
            raise self.problem(knob.start, f"{knob.text} is given twice")
        self.expect("=", f"'=' after {knob.text}")
        annotation = knobs[knob.text]
        # `int | None` allows the types of its parts, `int` is the only one of its own.
        if get_origin(annotation) is not tuple:
            given[knob.text] = self._read_one(name, knob, get_args(annotation) or (annotation,))
            return
        kinds = get_args(annotation)[:1]  # tuple[kind, ...] reads kind/kind/kind
        given[knob.text] = (self._read_one(name, knob, kinds),)
        while self.take("/"):
            given[knob.text] += (self._read_one(name, knob, kinds),)

    def _read_one(self, name: Token, knob: Token, kinds: Kinds) -> Any:
        token = self.tokens[self.position]
        value = self.read_value(kinds)
        if not _is_of(value, kinds):
            wanted = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
            raise self.problem(token.start, f"{knob.text} of {name.text} is {wanted}, not {token.text}")
        return float(value) if isinstance(value, int) and float in kinds and int not in kinds else value


def knobs_of(kind: type) -> dict[str, Any]:
    """Returns the annotations of the fields of a dataclass that have a text form."""
    plain = [bool, int, float, str, type(None), Ellipsis]  # a list: arguments of a Callable have no hash
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    return {
        name: annotation
        for name, annotation in fields.items()
        if all(one in plain for one in get_args(annotation) or (annotation,))
    }


def _is_of(value: Any, kinds: Kinds) -> bool:
    if isinstance(value, bool):
        # Before the numbers, because a bool is an int in Python.
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)
