"""Frozen dataclasses to plain dictionaries and back, so that every knob can be printed, saved and compared.

The law: `from_dict(to_dict(part), registry) == part`, tuples and nested parts included.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from attnrx.errors import InvalidInput, UnknownName

SCHEMA = 1


def to_dict(part: Any) -> dict[str, Any]:
    """Gives the type name and the fields of a dataclass as JSON-ready values."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        raise InvalidInput(f"to_dict({part!r}): only an instance of a dataclass has a configuration.")
    fields = {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part) if field.init}
    return {"type": type(part).__name__, **fields}


def from_dict(record: Mapping[str, Any], registry: Iterable[type]) -> Any:
    """Builds the dataclass that `to_dict` described; `registry` lists the types it may name."""
    types = {kind.__name__: kind for kind in registry}
    name = record.get("type", "")
    if name not in types:
        raise UnknownName("type", str(name), types)
    known = {field.name for field in dataclasses.fields(types[name]) if field.init}
    given = {key: value for key, value in record.items() if key != "type"}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidInput(f"{name} has no field {', '.join(unknown)}; its fields are {', '.join(sorted(known))}.")
    return types[name](**{key: _rich(value, types.values()) for key, value in given.items()})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidInput(f"a configuration may not hold {type(value).__name__}: {value!r}.")


def _rich(value: Any, types: Iterable[type]) -> Any:
    if isinstance(value, Mapping):
        if "type" in value:
            return from_dict(value, types)
        if value.keys() == {"tuple"}:
            return tuple(_rich(item, types) for item in value["tuple"])
        return {key: _rich(item, types) for key, item in value.items()}
    return value
