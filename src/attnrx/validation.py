"""Validation of what is read from files: one declarative vocabulary, and errors that name the file and the field.

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
    """A value that its field does not allow: where it is, and what is wrong; `validated` adds the file."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where} {problem}" if where else problem)


class Field(ABC):
    """One JSON value; `described` completes the sentence "it must be ..."."""

    @property
    @abstractmethod
    def described(self) -> str:
        """The allowed values in words."""

    @abstractmethod
    def check(self, value: Any, where: str) -> None:
        """Raises Invalid for a value that is not allowed."""

    def refuse(self, value: Any, where: str) -> Invalid:
        """The error for this value."""
        return Invalid(where, f"is {shown(value)}; it must be {self.described}")


@dataclass(frozen=True)
class Integer(Field):
    """A whole number in a closed range; true, false and 3.0 are none."""

    least: int = 0
    most: int = 2**63 - 1

    @property
    def described(self) -> str:
        """The range."""
        return f"an integer in {self.least}..{self.most}"

    def check(self, value: Any, where: str) -> None:
        """Refuses other types and other ranges."""
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Number(Field):
    """A finite number that float32 can hold."""

    least: float = -LARGEST_FLOAT32
    most: float = LARGEST_FLOAT32

    @property
    def described(self) -> str:
        """The range."""
        return f"a finite number in {self.least:g}..{self.most:g}"

    def check(self, value: Any, where: str) -> None:
        """Refuses other types, other ranges, NaN and infinity."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Text(Field):
    """A text, with `parse` one that this function reads without an error of ours."""

    parse: Callable[[str], object] | None = None

    @property
    def described(self) -> str:
        """The type."""
        return "a text"

    def check(self, value: Any, where: str) -> None:
        """Refuses other types, and texts that cannot be parsed."""
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
        """The two values."""
        return "true or false"

    def check(self, value: Any, where: str) -> None:
        """Refuses everything else, 0 and 1 too."""
        if not isinstance(value, bool):
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Choice(Field):
    """One of some texts or numbers."""

    values: tuple[Any, ...]

    @property
    def described(self) -> str:
        """The values."""
        return f"one of {', '.join(map(repr, self.values))}"

    def check(self, value: Any, where: str) -> None:
        """Refuses everything else."""
        if isinstance(value, list | dict | bool) or value not in self.values:
            raise self.refuse(value, where)


@dataclass(frozen=True)
class Anything(Field):
    """Any JSON value."""

    @property
    def described(self) -> str:
        """No limits."""
        return "any value"

    def check(self, value: Any, where: str) -> None:
        """Refuses nothing."""


@dataclass(frozen=True)
class Bounded(Field):
    """An object whose integers, nested ones too, are small enough to build something from."""

    most: int

    @property
    def described(self) -> str:
        """The range of integers."""
        return f"an integer in -{self.most}..{self.most}"

    def check(self, value: Any, where: str) -> None:
        """Refuses other types than objects, and larger integers."""
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
        """Both."""
        return f"{self.inner.described}, or null"

    def check(self, value: Any, where: str) -> None:
        """Checks what is not null."""
        if value is not None:
            self.inner.check(value, where)


@dataclass(frozen=True)
class Items(Field):
    """A list of values of one field; `unique` refuses the second of two equal ones."""

    inner: Field
    least: int = 0
    most: int = 2**31
    unique: bool = False

    @property
    def described(self) -> str:
        """The number of values."""
        if self.least == self.most:
            return f"a list of {self.least}"
        return f"a list of {self.least} or more" if self.most == 2**31 else f"a list of {self.least} to {self.most}"

    def check(self, value: Any, where: str) -> None:
        """Checks the length before the values, and their number before their kinds."""
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
    """An object with these fields; `more` are fields that may be absent, `then` compares fields with one another.

    Names that are in neither are refused unless the record is `open`.
    """

    fields: Mapping[str, Field] = field(default_factory=dict)
    more: Mapping[str, Field] = field(default_factory=dict)
    then: Callable[[Mapping[str, Any], str], None] | None = None
    open: bool = False

    @property
    def described(self) -> str:
        """The type."""
        return "an object"

    def check(self, value: Any, where: str) -> None:
        """Refuses missing and unknown names, then checks every field, then all of them together."""
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
"""An object of which nothing more is known."""


def below(where: str, name: str) -> str:
    """The path of a field of a record."""
    return f"{where}.{name}" if where else name


def validated(value: Any, expected: Field, path: Path | str) -> Any:
    """Returns the value if the field allows it.

    Raises:
        CheckpointError: It does not; the message names the file, the field and the allowed values.
    """
    try:
        expected.check(value, "")
    except Invalid as error:
        raise CheckpointError(f"{path}: {str(error).strip()}. The file was edited or damaged; make it again.") from None
    return value


def shown(value: Any) -> str:
    """A value as short text for a message."""
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
    """Returns the path of a regular file; a pipe or a device could block or never end when it is read.

    Raises:
        error: There is no such file, or it is a folder, a pipe, a socket or a device.
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
    """The depth of nested lists and objects, found without recursion."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth
