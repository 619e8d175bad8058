"""Parses the strings in which users write rules, token policies, checks, losses, formats and methods.

All of these texts share one grammar:

    call  = name [ "(" [ knob { "," knob } ] ")" ]
    short = name ":" knob { ( "," | ":" ) knob }           for rules and losses, instead of or after the brackets
    knob  = [ name "=" ] value { ( "/" | ";" ) value }      several values if the knob is a tuple
    value = number | "true" | "false" | "none" | word | call

Knobs are the options of an object, i.e. the fields of its dataclass. A value without a name is assigned to the first
knob that has no value yet. A number may end with %. Some strings have additional syntax, e.g. `a & b` or `0.7@4,7`,
which a subclass of `TextReader` parses.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.registry import Registry

Kind = TypeVar("Kind")

LONGEST_NUMBER = 40  # characters, because int() is slow for thousands of digits, and Python limits it
DEEPEST = 50  # the most opening brackets in a text, far below the nesting that exhausts Python's stack
WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "none": None}
NAME, NUMBER = r"[A-Za-z_][\w-]*", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# The characters of a value that is a text, e.g. the name of a choice or a path. In a list of values, "/" ends a value.
WORD, WORD_OF_SEVERAL = re.compile(r"\s*([^\s:,;()&|@<=]+)"), re.compile(r"\s*([^\s:,;()&|@<=/]+)")
# The NAME of `NAME=TEXT` is at the start of the text, or follows a space after a complete text. After one of , ; : ( &
# | a name before "=" is a knob.
_NAMED = re.compile(rf"(?:^|(?<=[^\s,;:(&|])\s+)({NAME})=")
_DESCRIBED = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "none"}


def share(text: str) -> float:
    """Parses a number or a percentage, e.g. `50%` as 0.5. Raises ValueError for any other string."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def split_named(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Splits `TEXT NAME=TEXT NAME=TEXT` into the first TEXT and a list of (NAME, TEXT) pairs."""
    before, *parts = _NAMED.split(text.strip())
    return before, [(name, part.strip()) for name, part in zip(parts[::2], parts[1::2], strict=True)]


def knobs_of(kind: type, nested: type | None = None) -> dict[str, "dataclasses.Field[Any]"]:
    """Returns the dataclass fields that users can set in a string, by name. Keyword-only fields come last.

    Users can set fields that contain a number, a boolean, a string, an object of the class `nested`, or a tuple of
    such values.
    """
    plain = [*_DESCRIBED, Ellipsis]  # a list, because the arguments of a Callable are not hashable

    def is_readable(part: Any) -> bool:
        return part in plain or (nested is not None and isinstance(part, type) and issubclass(part, nested))

    fields = [field for field in dataclasses.fields(kind) if field.init]
    readable = [field for field in fields if all(map(is_readable, get_args(field.type) or (field.type,)))]
    return {field.name: field for field in sorted(readable, key=lambda field: bool(field.kw_only))}


@dataclass(frozen=True)
class Token:
    """A token of a parsed string. Its `kind` is "number", "name" or "end", or the character itself for punctuation."""

    kind: str
    text: str
    start: int


def spelled_knobs(part: Any, nested: type | None = None) -> str:
    """Writes the options (knobs) of a dataclass instance as a string that `TextReader.read_knobs` can parse.

    Options without a default are written as values without a name, in order. Other options are written as NAME=VALUE,
    or left out if the value equals the default.
    """
    knobs = []
    for name, field in knobs_of(type(part), nested).items():
        value = getattr(part, name)
        if value != field.default:
            # A float is written with all digits, so that the parsed object is equal. The words true, false and none are
            # written as in the grammar.
            text = str(value).lower() if isinstance(value, bool | None) else str(value)
            knobs.append(text if field.default is dataclasses.MISSING else f"{name}={text}")
    return ",".join(knobs)


class TextReader:
    """A recursive-descent parser of one string. Subclasses have a method for each rule of their grammar.

    A subclass sets `noun`, `plural` and `examples` for its error messages. `signs` is the punctuation that its strings
    may contain, and `error` is the class of its errors. If the value of an option can be a call, `nested` is the class
    of the object that such a call creates, and `read_nested` parses the call.

    Raises:
        InvalidInput: The string does not follow the grammar. The error has the class `error`, and its message contains
            the position of the problem.
        UnknownName: The string contains an unknown name or option.
    """

    noun: ClassVar[str]
    plural: ClassVar[str]
    examples: ClassVar[str]
    signs: ClassVar[str]
    error: ClassVar[type[InvalidInput]] = InvalidInput
    nested: ClassVar[type | None] = None

    def __init__(self, text: str):
        if not isinstance(text, str):
            found = type(text).__name__
            raise self.error(
                f"a {self.noun} of the type {found}: give a text. {self.plural} read like {self.examples}."
            )
        self.text, self.position = text, 0
        if text.count("(") > DEEPEST:
            raise self.error(f"a {self.noun} in text may have {DEEPEST} brackets, found {text.count('(')}.")

    @property
    def token(self) -> Token:
        """The next token, without consuming it. Raises `error` if the next characters do not form a token."""
        rest = self.text[self.position :].lstrip()
        if not rest:
            return Token("end", "the end", len(self.text.rstrip()))
        start = len(self.text) - len(rest)
        # A number must not be followed by a letter or a dot. So 0.5x and 1.2.3 are errors, and not two tokens each. A
        # plus or minus before a number is a part of the number.
        match = re.match(rf"(?P<number>{NUMBER}%?)(?![\w.])|(?P<name>{NAME})|(?P<sign>[{re.escape(self.signs)}])", rest)
        if match is None or match.lastgroup is None:
            raise self.problem(start, f"{rest.split()[0]!r} cannot be read")
        kind, text = match.lastgroup, match[0]
        if kind == "number" and len(text) > LONGEST_NUMBER:
            raise self.problem(start, f"a number of {len(text)} characters is too long")
        return Token(text if kind == "sign" else kind, text, start)

    def take(self, kind: str) -> bool:
        """Consumes the next token if it has this `kind`. Returns whether it has this `kind`."""
        token = self.token
        if token.kind == kind != "end":
            self.position = token.start + len(token.text)
        return token.kind == kind

    def expect(self, kind: str, wanted: str) -> Token:
        """Consumes and returns the next token. Raises `error` if the token does not have this `kind`."""
        token = self.token
        if not self.take(kind):
            raise self.problem(token.start, f"expected {wanted}, found {token.text!r}")
        return token

    def problem(self, start: int, problem: str) -> InvalidInput:
        """Returns an error with the position of the problem and with examples of valid strings."""
        where = f"the {self.noun} {self.text!r}, at character {start + 1}"
        return self.error(f"{where}: {problem}. {self.plural} read like {self.examples}.")

    def read_name(self, registry: Registry[type[Kind]]) -> tuple[Token, type[Kind]]:
        """Parses the name of a registered class, and returns the name's token and the class.

        Raises:
            UnknownName: The registry has no such name.
        """
        name = self.expect("name", f"the name of a {registry.noun}")
        return name, registry[name.text]

    def read_knobs(self, name: Token, kind: type, *, is_short: bool = False, filled: Collection[str] = ()) -> dict:
        """Parses a class's options (knobs), if any, in brackets and, with `is_short`, also after a colon.

        Options in `filled` already have a value, so values without a name are assigned to the other options.

        Raises:
            UnknownName: The class has no such knob.
        """
        knobs, given = knobs_of(kind, self.nested), dict[str, Any]()
        if self.take("(") and not self.take(")"):
            self._read_knob(name, knobs, given, filled)
            while self.take(","):
                self._read_knob(name, knobs, given, filled)
            self.expect(")", "')'")
        if is_short and self.take(":"):
            self._read_knob(name, knobs, given, filled)
            while self.take(",") or self.take(":"):
                self._read_knob(name, knobs, given, filled)
        return given

    def build(self, name: Token, kind: type[Kind], values: Mapping[str, Any]) -> Kind:
        """Creates an object from the values of its options. Raises `error` if a required option is missing."""
        missing = [
            knob.name
            for knob in knobs_of(kind, self.nested).values()
            if knob.default is dataclasses.MISSING is knob.default_factory and knob.name not in values
        ]
        if missing:
            needed = " and ".join(missing)
            raise self.problem(name.start, f"{name.text} needs {needed}, as in {name.text}({missing[0]}=...)")
        return kind(**values)

    def read_nested(self) -> Any:
        """Parses an object of the class `nested`."""
        raise NotImplementedError

    def _read_knob(self, name: Token, knobs: Mapping[str, Any], given: dict[str, Any], filled: Collection[str]) -> None:
        if not knobs:
            raise self.problem(self.token.start, f"{name.text} has no knobs")
        named = re.compile(rf"\s*({NAME})\s*=").match(self.text, self.position)
        if named is not None:
            knob, start, self.position = named[1], named.start(1), named.end()
        else:
            start = self.token.start
            free = [knob for knob in knobs if not knobs[knob].kw_only and knob not in given and knob not in filled]
            if not free:
                found = self.token.text
                raise self.problem(start, f"{name.text} has only the knobs {', '.join(knobs)}, found {found!r}")
            knob = free[0]
        if knob not in knobs:
            raise UnknownName(f"knob of {name.text}", knob, knobs)
        if knob in given:
            raise self.problem(start, f"{knob} is given twice")
        annotation = knobs[knob].type
        if get_origin(annotation) is not tuple:
            # A union such as `int | None` allows a value of any of its types.
            given[knob] = self._read_value(name, knob, get_args(annotation) or (annotation,), WORD)
            return
        kinds = get_args(annotation)[:1]
        values = [self._read_value(name, knob, kinds, WORD_OF_SEVERAL)]
        while self.take("/") or self.take(";"):
            values.append(self._read_value(name, knob, kinds, WORD_OF_SEVERAL))
        given[knob] = tuple(values)

    def _read_value(self, name: Token, knob: str, kinds: tuple[type, ...], word: re.Pattern[str]) -> Any:
        """Parses one value of an option. The value must have one of the types `kinds`."""
        described = " or ".join(_DESCRIBED.get(kind) or f"a {kind.__name__.lower()}" for kind in kinds)
        if str in kinds and (match := word.match(self.text, self.position)):
            self.position = match.end()
            return None if match[1] == "none" and NoneType in kinds else match[1]
        token = self.token
        # The words true, false and none are values, even if the knob accepts a call.
        if not {*_DESCRIBED}.issuperset(kinds) and token.kind != "number" and token.text not in WORDS:
            return self.read_nested()
        if self.take("number"):
            value: Any = int(token.text) if re.fullmatch(r"[-+]?\d+", token.text) else share(token.text)
        else:
            text = self.expect("name", f"{described} for {knob}").text
            value: Any = WORDS.get(text, text)
        # A bool is not a number here, although bool is a subclass of int in Python.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = type(value) in kinds or (is_number and float in kinds)
        if not fits:
            raise self.problem(token.start, f"{knob} of {name.text} is {described}, not {token.text}")
        return float(value) if is_number and int not in kinds else value
