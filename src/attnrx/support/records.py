"""Records of JSON files: their declarative validation, and conversion of frozen dataclasses to records and back.

A field describes one JSON value. `validated(value, field, path)` returns the value, or raises a CheckpointError that
names file and field: `prescription.json: layers[3].heads[1].keep[0] is -1; it must be an integer in 0..63.`
"""

import dataclasses
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attnrx.support.arguments import described, named_kind
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, UnknownName

Part = TypeVar("Part")
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


def matching(pattern: str, described: str) -> Field:
    return Field(described, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)))


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


def to_dict(part: Any) -> dict[str, Any]:
    """Returns the type name and the fields of a dataclass instance as JSON-ready values.

    Raises:
        InvalidInput: It is no instance of a dataclass, or a field holds a value that JSON cannot have.
    """
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        raise InvalidInput(f"to_dict({part!r}): only an instance of a dataclass has a configuration.")
    fields = {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part) if field.init}
    return {"type": type(part).__name__, **fields}


def from_dict(record: Mapping[str, Any], registry: Iterable[type], where: str = "") -> Any:
    """Builds the dataclass from a record of `to_dict`; `registry` lists the allowed types.

    The law: `from_dict(to_dict(part), registry) == part`, including tuples and nested dataclasses.

    A type may have fields of earlier versions, `retired`, by their names: records have them with these values only.

    Raises:
        InvalidInput: A field is unknown, missing or not of its annotated type; the message names it, prefixed by
            `where`.
        UnknownName: The registry has no such type.
    """
    kinds = {kind.__name__: kind for kind in registry}
    name = record.get("type", "") if isinstance(record, Mapping) else None
    if not isinstance(name, str):
        raise InvalidInput(f"{where or 'the configuration'} is {described(record)}; it must be an object with a type.")
    if name not in kinds:
        raise UnknownName("type", name, kinds)
    fields = {field.name: field for field in dataclasses.fields(kinds[name]) if field.init}
    entries = {key: value for key, value in record.items() if key != "type"}
    for key, value in getattr(kinds[name], "retired", {}).items():
        if key in entries and (found := _rich(entries.pop(key), kinds.values(), below(where, key))) != value:
            raise InvalidInput(
                f"{below(where, key)} is {described(found)}: an earlier version made this {name}, and what it needs is "
                f"no longer there. Make it again without {key}."
            )
    unknown = sorted(entries.keys() - fields.keys())
    if unknown:
        raise InvalidInput(f"{name} has no field {', '.join(unknown)}; its fields are {', '.join(sorted(fields))}.")
    # A field without a default has MISSING in both places.
    required = [key for key, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    missing = [key for key in required if key not in entries]
    if missing:
        raise InvalidInput(f"{below(where, missing[0])} is missing; {name} needs it.")
    values = {key: _rich(value, kinds.values(), below(where, key)) for key, value in entries.items()}
    for key, value in values.items():
        # An empty text is one here: the path of a part that a model lacks.
        if not (kind := named_kind(key, fields[key].type)).accepts("-" if value == "" else value):
            raise InvalidInput(f"{below(where, key)} is {described(entries[key])}; it must be {kind.expected}.")
    return kinds[name](**values)


def fields_of(part: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON values, without its type: tuples become lists."""
    return {field.name: _listed(getattr(part, field.name)) for field in dataclasses.fields(part)}


def of_fields(kind: type[Part], record: Mapping[str, Any]) -> Part:
    """Builds a dataclass, whose type the caller knows, from what `fields_of` returned: lists become tuples."""
    return kind(**{name: _tupled(value) for name, value in record.items()})


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    # JSON would read a tuple back as a list, and frozen dataclasses compare and hash tuples.
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(f"a configuration may not hold {type(value).__name__}: {value!r}.")


def _rich(value: Any, registry: Iterable[type], where: str) -> Any:
    if isinstance(value, Mapping):
        if "type" in value:
            return from_dict(value, registry, where)
        if value.keys() == {"tuple"} and isinstance(value["tuple"], list):
            return tuple(_rich(item, registry, f"{where}[{index}]") for index, item in enumerate(value["tuple"]))
        return {key: _rich(item, registry, below(where, key)) for key, item in value.items()}
    return value
