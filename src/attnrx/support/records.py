"""Validates the records of JSON files, and converts frozen dataclasses to records and back.

`validated(value, kind, path)` returns the value if the kind (`arguments.Kind`) allows it. Otherwise it raises a
CheckpointError that names the file and the field:
`prescription.json: layers[3].heads[1].keep[0] is -1; it must be a whole number of 0 or more, at most 63.`
"""

import dataclasses
import stat
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from attnrx.support.arguments import Invalid, Kind, below, described, named_kind
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, UnknownName

# These limits are far above any real model. They keep a wrong count in a file from allocating gigabytes.
MAX_LAYERS, MAX_HEADS, MAX_DIRECTIONS = 4096, 4096, 65_536
DEEPEST_JSON = 256  # a rule with 50 brackets nests 150 deep


def validated(value: Any, expected: Kind, path: Path | str) -> Any:
    """Returns the value if `expected` allows it. Otherwise, raises a CheckpointError with the file and the field."""
    try:
        expected.check(value, "")
    except Invalid as error:
        raise CheckpointError(f"{path}: {str(error).strip()}. The file was edited or damaged; make it again.") from None
    return value


def require_regular(path: Path | str, error: type[AttnrxError] = CheckpointError) -> Path:
    """Returns the path of a regular file. Raises `error` for anything else, e.g. a pipe, which could block forever."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise error(f"{path} does not exist; check the path.") from None
    except (OSError, ValueError) as problem:  # ValueError: a null byte in the name
        raise error(f"{str(path)!r} cannot be read: {problem}.") from None
    if not stat.S_ISREG(mode):
        found = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise error(f"{path} is {found}; give a regular file.")
    return path


def nesting(value: Any) -> int:
    """Returns the nesting depth of lists and objects, even if it exceeds Python's recursion limit."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return depth


def to_dict(part: Any, *, typed: bool = True) -> dict[str, Any]:
    """Returns the type name and the fields of a dataclass instance, as JSON-ready values.

    Without `typed`, the record has no type name, and tuples become lists. To convert an untyped record back, pass the
    class to `from_dict`.

    Raises:
        InvalidInput: The argument is not an instance of a dataclass, or a field has a value that JSON cannot represent.
    """
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        raise InvalidInput(f"to_dict({part!r}): only an instance of a dataclass has a configuration.")
    fields = {field.name: _plain(getattr(part, field.name), typed) for field in dataclasses.fields(part) if field.init}
    return {"type": type(part).__name__, **fields} if typed else fields


def without_folders(value: Any) -> Any:
    """Returns a JSON-ready value in which every absolute path is replaced by its last part and a short hash.

    A file with this value does not reveal its author's folders. The hash distinguishes paths with the same last part.
    """
    if isinstance(value, Mapping):
        return {without_folders(key): without_folders(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_folders, value))
    if not isinstance(value, str) or not Path(value).is_absolute():
        return value
    return f"{Path(value).name} ({sha256(value.encode(errors='surrogateescape')).hexdigest()[:8]})"


def from_dict(record: Mapping[str, Any], kinds: type | Iterable[type], where: str = "") -> Any:
    """Creates a dataclass instance from a record that `to_dict` returned.

    `kinds` are the allowed classes if the record names its type. If the record is untyped, `kinds` is its class. The
    round trip `from_dict(to_dict(part), kinds) == part` holds, including tuples and nested dataclasses.

    Raises:
        InvalidInput: A field is unknown or missing or, in a typed record, does not have its annotated type. The message
            names the field, prefixed by `where`.
        UnknownName: None of the allowed classes has the name of the record's type.
    """
    typed = None if isinstance(kinds, type) else {kind.__name__: kind for kind in kinds}
    kind = kinds if isinstance(kinds, type) else _kind_of(record, typed or {}, where)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    entries = {key: value for key, value in record.items() if typed is None or key != "type"}
    unknown = sorted(entries.keys() - fields.keys())
    if unknown:
        known = ", ".join(sorted(fields))
        raise InvalidInput(f"{kind.__name__} has no field {', '.join(unknown)}; its fields are {known}.")
    # A field without a default has MISSING as both default and factory.
    required = [key for key, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    missing = [key for key in required if key not in entries]
    if missing:
        raise InvalidInput(f"{below(where, missing[0])} is missing; {kind.__name__} needs it.")
    values = {key: _rich(value, typed, below(where, key)) for key, value in entries.items()}
    # Values in an untyped record are not checked here, because they were checked when their file was loaded.
    for key, value in {} if typed is None else values.items():
        # An empty text is allowed here, because it is the path of a part that a model does not have.
        if not (allowed := named_kind(key, fields[key].type)).accepts("-" if value == "" else value):
            raise InvalidInput(f"{below(where, key)} is {described(entries[key])}; it must be {allowed.expected}.")
    return kind(**values)


def _kind_of(record: Any, kinds: Mapping[str, type], where: str) -> type[Any]:
    name = record.get("type", "") if isinstance(record, Mapping) else None
    if not isinstance(name, str):
        raise InvalidInput(f"{where or 'the configuration'} is {described(record)}; it must be an object with a type.")
    if name not in kinds:
        raise UnknownName("type", name, kinds)
    return kinds[name]


def _plain(value: Any, typed: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    # JSON would turn a tuple into a list, but frozen dataclasses compare and hash tuples.
    if isinstance(value, tuple):
        items = [_plain(item, typed) for item in value]
        return {"tuple": items} if typed else items
    if isinstance(value, Mapping):
        # Mappings in an untyped record are JSON values already, and `_rich` does not change them either.
        return {key: _plain(item, typed) for key, item in value.items()} if typed else value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(f"a configuration may not hold {type(value).__name__}: {value!r}.")


def _rich(value: Any, kinds: Mapping[str, type] | None, where: str) -> Any:
    """Converts a field's value from JSON. `kinds` are the classes allowed in a typed record, or None if untyped."""
    if kinds is None:
        return tuple(_rich(item, None, where) for item in value) if isinstance(value, list) else value
    if isinstance(value, Mapping):
        if "type" in value:
            return from_dict(value, kinds.values(), where)
        if value.keys() == {"tuple"} and isinstance(value["tuple"], list):
            return tuple(_rich(item, kinds, f"{where}[{index}]") for index, item in enumerate(value["tuple"]))
        return {key: _rich(item, kinds, below(where, key)) for key, item in value.items()}
    return value
