"""Declarative validation of JSON files; errors name the file and the field.

A field describes one JSON value. `validated(value, field, path)` returns the value or raises a CheckpointError such as
`prescription.json: layers[3].heads[1].keep[0] is -1; it must be an integer in 0..63.`
"""

import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from attnrx.support.arguments import described
from attnrx.support.errors import AttnrxError, CheckpointError

LARGEST_FLOAT32 = 3.4028234663852886e38
# Far above any model, and low enough that a wrong count does not allocate gigabytes.
MAX_LAYERS, MAX_HEADS, MAX_DIRECTIONS = 4096, 4096, 65_536
DEEPEST_JSON = 256  # a rule of 50 brackets nests 150 deep


class Invalid(Exception):
    """A value that its field does not allow, with its path and the problem; `validated` adds the file."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where} {problem}" if where else problem)


class Field:
    """One JSON value: whether it is allowed, and the allowed values as the end of the sentence "it must be ..."."""

    def __init__(self, described: str, allows: Callable[[Any], bool]):
        self.described, self.allows = described, allows

    def check(self, value: Any, where: str) -> None:
        """Raises Invalid for a value, at the path `where` of a file, that is not allowed."""
        if not self.allows(value):
            raise Invalid(where, f"is {described(value)}; it must be {self.described}")


class Integer(Field):
    """An integer in a closed range; true, false and 3.0 are not integers."""

    def __init__(self, least: int = 0, most: int = 2**63 - 1):
        # Not isinstance: a bool is an int in Python.
        super().__init__(f"an integer in {least}..{most}", lambda value: type(value) is int and least <= value <= most)


class Number(Field):
    """A finite number that float32 can hold."""

    def __init__(self, least: float = -LARGEST_FLOAT32, most: float = LARGEST_FLOAT32):
        described = f"a finite number in {least:g}..{most:g}"
        super().__init__(described, lambda value: type(value) in (int, float) and least <= value <= most)


class Text(Field):
    """A text; with `parse`, one for which this function raises no AttnrxError."""

    def __init__(self, parse: Callable[[str], object] | None = None):
        super().__init__("a text", lambda value: isinstance(value, str))
        self.parse = parse

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        if self.parse is not None:
            try:
                self.parse(value)
            except AttnrxError as error:
                raise Invalid(where, f"is {described(value)}: {str(error).rstrip('.')}") from error


FLAG = Field("true or false", lambda value: isinstance(value, bool))
ANYTHING = Field("any value", lambda value: True)


class Choice(Field):
    """One of some texts or numbers."""

    def __init__(self, values: tuple[Any, ...]):
        described = f"one of {', '.join(map(repr, values))}"
        # True == 1 in Python.
        super().__init__(described, lambda value: not isinstance(value, bool) and value in values)


class Bounded(Field):
    """An object whose integers, including nested ones, have an absolute value of at most `most`; those of the fields
    `counted` may have any.
    """

    def __init__(self, most: int, counted: Collection[str] = ()):
        super().__init__("an object", lambda value: isinstance(value, Mapping))
        self.counted = counted
        self.integer = Field(f"an integer in -{most}..{most}", lambda value: abs(value) <= most)

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        self._check_within(value, where)

    def _check_within(self, value: Any, where: str) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                if name not in self.counted:
                    self._check_within(part, below(where, name))
        elif isinstance(value, list):
            for index, part in enumerate(value):
                self._check_within(part, f"{where}[{index}]")
        elif isinstance(value, int):
            self.integer.check(value, where)


class Optional(Field):
    """Null, or a value of another field."""

    def __init__(self, inner: Field):
        super().__init__(f"{inner.described}, or null", lambda value: True)
        self.inner = inner

    def check(self, value: Any, where: str) -> None:
        if value is not None:
            self.inner.check(value, where)


class Items(Field):
    """A list of values of one field; with `unique`, without duplicates."""

    def __init__(self, inner: Field, least: int = 0, most: int = 2**31, unique: bool = False):
        length = f"{least} or more" if most == 2**31 else f"{least} to {most}"
        described = f"a list of {least if least == most else length}"
        super().__init__(described, lambda value: isinstance(value, list))
        self.inner, self.least, self.most, self.unique = inner, least, most, unique

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        if not self.least <= len(value) <= self.most:
            raise Invalid(where, f"has {len(value)} values; it must be {self.described}")
        for index, item in enumerate(value):
            self.inner.check(item, f"{where}[{index}]")
        first: dict[Any, int] = {}  # unique values are texts or numbers, which can be keys
        for index, item in enumerate(value if self.unique else ()):
            if first.setdefault(item, index) != index:
                raise Invalid(
                    f"{where}[{index}]", f"is {described(item)}, as {where}[{first[item]}] is; give each once"
                )


class Record(Field):
    """An object with required `fields` and optional fields `more`; `then` checks the fields together.

    Other names are allowed only if the record is `open`.
    """

    def __init__(
        self,
        fields: Mapping[str, Field] | None = None,
        more: Mapping[str, Field] | None = None,
        then: Callable[[Mapping[str, Any], str], None] | None = None,
        open: bool = False,
    ):
        super().__init__("an object", lambda value: isinstance(value, Mapping))
        self.required, self.then, self.open = tuple(fields or ()), then, open
        self.known = {**(fields or {}), **(more or {})}

    def check(self, value: Any, where: str) -> None:
        super().check(value, where)
        for name in self.required:
            if name not in value:
                raise Invalid(below(where, name), "is missing")
        for name in value:
            if name not in self.known and not self.open:
                raise Invalid(below(where, name), f"is unknown; known are {', '.join(self.known)}")
        # `then` comes last: it may rely on every field being valid by itself.
        for name in self.known.keys() & value.keys():
            self.known[name].check(value[name], below(where, name))
        if self.then is not None:
            self.then(value, where)


JSON_OBJECT = Record(open=True)
"""Any JSON object."""


def below(where: str, name: str) -> str:
    """Returns the path of a field of a record."""
    return f"{where}.{name}" if where else name


def validated(value: Any, expected: Field, path: Path | str) -> Any:
    """Returns a value that `expected` allows; for others it raises CheckpointError, which names file and field."""
    try:
        expected.check(value, "")
    except Invalid as error:
        raise CheckpointError(f"{path}: {str(error).strip()}. The file was edited or damaged; make it again.") from None
    return value


def require_regular(path: Path | str, error: type[AttnrxError] = CheckpointError) -> Path:
    """Returns the path of a regular file; raises `error` for all else, because reading a pipe could block forever."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path} does not exist.") from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise error(f"{str(path)!r} cannot be read: {problem}.") from None
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise error(f"{path} is {found}; give a regular file.")
    return path


def nesting(value: Any) -> int:
    """Returns the nesting depth of lists and objects; iterative, so that it cannot exceed the recursion limit."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth
