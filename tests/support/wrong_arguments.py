"""Calls of public functions and constructors in which one argument has a value that its annotation excludes."""

import collections.abc
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch


class Stubborn:
    """An object whose repr and comparisons raise."""

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


def raising(*positional: Any, **named: Any) -> Any:
    raise ZeroDivisionError("of the user")


# No value has a meaning for all arguments; which of them an argument may have follows from its annotation.
VALUES: Mapping[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "a half": 0.5,
    "10^30": 10**30,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "NaN of numpy": np.float64("nan"),
    "complex": 1 + 2j,
    "empty text": "",
    "text": "no such thing",
    "text with zero byte": "a\0b",
    "lone surrogate": "a\ud800b",
    "long text": "x" * 5000,
    "bytes": b"abc",
    "empty list": [],
    "list": [None, 1.5],
    "empty dict": {},
    "dict": {"a": object()},
    "set": {1, 2},
    "object": object(),
    "class": int,
    "function": raising,
    "stubborn": Stubborn(),
    "array": np.zeros(3),
    "tensor": torch.zeros(3),
    "generator": (number for number in ()),
    "module": torch.nn.Linear(2, 2),
    "path": Path("/nowhere/at/all"),
}
# Values of the right type that mean nothing for any argument.
MEANINGLESS = ("10^30", "NaN", "infinity", "NaN of numpy", "empty text", "text with zero byte", "lone surrogate")


def allowed(value: Any, hint: Any) -> bool:
    """Whether an annotation includes a value; a bool is no number here, and Any includes everything."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(allowed(value, one) for one in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
        parts = [one for one in arguments if one is not Ellipsis] or [Any]
        return isinstance(value, list | tuple) and all(allowed(each, parts[0]) for each in value)
    if origin in (dict, collections.abc.Mapping):
        return isinstance(value, Mapping)
    if origin is collections.abc.Callable:
        return callable(value)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint if isinstance(hint, type) else origin or object)


@dataclass(frozen=True)
class Case:
    """A call with one wrong argument."""

    function: str
    argument: str
    value: str
    call: Callable[[], object]

    def __str__(self) -> str:
        return f"{self.function}({self.argument}: {self.value})"


def of_function(function: Callable[..., Any], valid: Mapping[str, Any], free: Mapping[str, Any]) -> Iterator[Case]:
    """Yields the calls of a function; `valid` has valid arguments, `free` annotations in place of those of data."""
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        hint = free.get(name, Any) if hints[name] is Any else hints[name]
        yield from _cases(function.__qualname__, name, hint, partial(function), valid)


def of_class(kind: type, valid: Mapping[str, Any], free: Mapping[str, Any]) -> Iterator[Case]:
    """Yields the constructions of a dataclass with one wrong field."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.init and not field.name.startswith("_"):
            yield from _cases(kind.__name__, field.name, free.get(field.name, hints[field.name]), kind, valid)


def _cases(function: str, name: str, hint: Any, call: Callable[..., Any], valid: Mapping[str, Any]) -> Iterator[Case]:
    for label, value in VALUES.items():
        # A large number is a valid float, and too large for a count.
        is_meaningless = label in MEANINGLESS and not (label == "10^30" and allowed(0.5, hint))
        if not allowed(value, hint) or is_meaningless:
            yield Case(function, name, label, partial(call, **{**valid, name: value}))
