"""Conversion of frozen dataclasses to JSON-ready dictionaries and back.

Invariant: `from_dict(to_dict(part), registry) == part`, including tuples and nested dataclasses.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from attnrx.support.arguments import described, named_kind
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.validation import below

SCHEMA = 1
Part = TypeVar("Part")


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
