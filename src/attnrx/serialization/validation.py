"""Declarative validation of JSON files; errors name the file and the field.

A field describes one JSON value. `validated(value, field, path)` returns the value or raises a CheckpointError such as
`prescription.json: layers[3].heads[1].keep[0] is -1; it must be an integer in 0..63.`
"""

import math
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnrx.errors import AttnrxError, CheckpointError

LARGEST_FLOAT32 = 3.4028234663852886e38
MOST_LAYERS, MOST_HEADS, MOST_DIRECTIONS = 4096, 4096, 65_536
DEEPEST_JSON = 256  # a rule of 50 brackets nests 150 deep
SHOWN = 60  # characters of a wrong value in a message


class Invalid(Exception):
    """A value that its field does not allow, with its path and the problem; `validated` adds the file."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where} {problem}" if where else problem)


class Field(ABC):
    """One JSON value; `described` completes the sentence "it must be ..."."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The allowed values as text."""

    @abstractmethod
    def check(self, value: Any, where: str) -> None:
        """Raises Invalid for a value that is not allowed."""

    def refuse(self, value: Any, where: str) -> Invalid:
        """Returns the error for this value."""
        return Invalid(where, f"is {shown(value)}; it must be {self.described}")


@dataclass(frozen=True)
class Integer(Field):
    """An integer in a closed range; true, false and 3.0 are not integers."""

    least: int = 0
    most: int = 2**63 - 1

    @property
    def described(self) -> str:
        return f"an integer in {self.least}..{self.most}"

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Number(Field):
    """A finite number that float32 can hold."""

    least: float = -LARGEST_FLOAT32
    most: float = LARGEST_FLOAT32

    @property
    def described(self) -> str:
        return f"a finite number in {self.least:g}..{self.most:g}"

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Text(Field):
    """A text; with `parse`, one for which this function raises no AttnrxError."""

    parse: Callable[[str], object] | None = None

    @property
    def described(self) -> str:
        return "a text"

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, str):
            raise self.refuse(value, where)
        if self.parse is not None:
            try:
                self.parse(value)
            except AttnrxError as error:
                raise Invalid(where, f"is {shown(value)}: {str(error).rstrip('.')}") from error


@dataclass(frozen=True)
class Flag(Field):
    """True or false."""

    @property
    def described(self) -> str:
        return "true or false"

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, bool):
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Choice(Field):
    """One of some texts or numbers."""

    values: tuple[Any, ...]

    @property
    def described(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}"

    def check(self, value: Any, where: str) -> None:
        if isinstance(value, list | dict | bool) or value not in self.values:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Anything(Field):
    """Any JSON value."""

    @property
    def described(self) -> str:
        return "any value"

    def check(self, value: Any, where: str) -> None:
        """Accepts every value."""


@dataclass(frozen=True)
class Bounded(Field):
    """An object whose integers, including nested ones, have an absolute value of at most `most`."""

    most: int

    @property
    def described(self) -> str:
        return f"an integer in -{self.most}..{self.most}"

    def check(self, value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise Invalid(where, f"is {shown(value)}; it must be an object")
        self._check_within(value, where)

    def _check_within(self, value: Any, where: str) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                self._check_within(part, below(where, name))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                self._check_within(part, f"{where}[{index}]")
        elif isinstance(value, int) and abs(value) > self.most:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Optional(Field):
    """Null, or a value of another field."""

    inner: Field

    @property
    def described(self) -> str:
        return f"{self.inner.described}, or null"

    def check(self, value: Any, where: str) -> None:
        if value is not None:
            self.inner.check(value, where)


@dataclass(frozen=True)
class Items(Field):
    """A list of values of one field; with `unique`, without duplicates."""

    inner: Field
    least: int = 0
    most: int = 2**31
    unique: bool = False

    @property
    def described(self) -> str:
        if self.least == self.most:
            return f"a list of {self.least}"
        return f"a list of {self.least} or more" if self.most == 2**31 else f"a list of {self.least} to {self.most}"

    def check(self, value: Any, where: str) -> None:
        """Checks the type, the length, the values, then uniqueness."""
        if not isinstance(value, list):
            raise self.refuse(value, where)
        if not self.least <= len(value) <= self.most:
            raise Invalid(where, f"has {len(value)} values; it must be {self.described}")
        for index, item in enumerate(value):
            self.inner.check(item, f"{where}[{index}]")
        if self.unique:
            self._check_unique(value, where)

    @staticmethod
    def _check_unique(value: list[Any], where: str) -> None:
        first: dict[Any, int] = {}
        for index, item in enumerate(value):
            if first.setdefault(item, index) != index:
                raise Invalid(f"{where}[{index}]", f"is {shown(item)}, as {where}[{first[item]}] is; give each once")


@dataclass(frozen=True)
class Record(Field):
    """An object with required `fields` and optional fields `more`; `then` checks the fields together.

    Other names are allowed only if the record is `open`.
    """

    fields: Mapping[str, Field] = field(default_factory=dict)
    more: Mapping[str, Field] = field(default_factory=dict)
    then: Callable[[Mapping[str, Any], str], None] | None = None
    open: bool = False

    @property
    def described(self) -> str:
        return "an object"

    def check(self, value: Any, where: str) -> None:
        """Checks for missing and unknown names, then every field, then calls `then`."""
        if not isinstance(value, Mapping):
            raise self.refuse(value, where)
        missing = [name for name in self.fields if name not in value]
        if missing:
            raise Invalid(below(where, missing[0]), "is missing")
        known = {**self.fields, **self.more}
        unknown = [name for name in value if name not in known]
        if unknown and not self.open:
            raise Invalid(below(where, unknown[0]), f"is unknown; known are {', '.join(known)}")
        for name in known.keys() & value.keys():
            known[name].check(value[name], below(where, name))
        if self.then is not None:
            self.then(value, where)


JSON_OBJECT = Record(open=True)
"""Any JSON object."""


def below(where: str, name: str) -> str:
    """Returns the path of a field of a record."""
    return f"{where}.{name}" if where else name


def validated(value: Any, expected: Field, path: Path | str) -> Any:
    """Returns the value if `expected` allows it.

    Raises:
        CheckpointError: The value is not allowed; the message names the file, the field and the allowed values.
    """
    try:
        expected.check(value, "")
    except Invalid as error:
        raise CheckpointError(f"{path}: {str(error).strip()}. The file was edited or damaged; make it again.") from None
    return value


def shown(value: Any) -> str:
    """Returns a value as short text for a message."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > 10**SHOWN:
        return f"an integer of {value.bit_length()} bits"
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def require_regular(path: Path | str, error: type[AttnrxError] = CheckpointError) -> Path:
    """Returns the path of a regular file; reading a pipe or a device could block forever.

    Raises:
        error: The file is missing, or is a folder, a pipe, a socket or a device.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path} does not exist.") from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise error(f"{str(path)!r} cannot be read: {problem}.") from None
    if not stat.S_ISREG(mode):
        kind = next((name for name, holds in KINDS if holds(mode)), "no regular file")
        raise error(f"{path} is {kind}; give a regular file.")
    return path


KINDS: tuple[tuple[str, Callable[[int], bool]], ...] = (
    ("a folder", stat.S_ISDIR),
    ("a named pipe", stat.S_ISFIFO),
    ("a socket", stat.S_ISSOCK),
    ("a device", stat.S_ISCHR),
    ("a device", stat.S_ISBLK),
)


def nesting(value: Any) -> int:
    """Returns the nesting depth of lists and objects; iterative, so that it cannot exceed the recursion limit."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth
