"""Kinds of values, which validate function arguments, dataclass fields, and values in JSON files.

A public function states the kinds of its arguments:

    @checked(faster=optional(FASTER))
    def shrink(model: nn.Module, faster: float | None = None, batch: int = 32, ...):

An argument of another kind raises InvalidInput before the function does any work: `shrink(batch=0): give a positive
whole number, at most 65536.` A wrong value in a file raises CheckpointError, with the path of the value in the file
(`records.validated`).
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, wraps
from numbers import Integral, Number, Real
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import nn

from attnrx.support.display import short_value
from attnrx.support.errors import AttnrxError, InvalidInput, UserCodeError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])
LONGEST_NAME = 255  # bytes in one part of a path, on all common file systems
LARGEST, LARGEST_FLOAT32 = 2**63 - 1, 3.4028234663852886e38
LONGEST_PATH = 4000  # bytes (systems allow 4,096, including the folder before a relative path)


class Invalid(Exception):
    """The error for a value that a kind does not allow. The message contains the value's path and the problem."""

    def __init__(self, where: str, problem: str):
        super().__init__(f"{where} {problem}" if where else problem)


@dataclass(frozen=True)
class Kind:
    """A set of allowed values, against which arguments and fields are validated.

    In messages, `expected` completes the sentences "give ..." and "it must be ...".

    `allows` tests a value, and `inside` checks the parts of a container. `convert` returns the value that a function
    receives, e.g. a Python number for a NumPy number. `explain` may return the end of an error message, which says what
    is wrong with an argument. A value from a file must have one of the `classes`, if there are any. Arguments may have
    other classes, because they may be NumPy numbers.
    """

    expected: str
    allows: Callable[[Any], bool] = lambda value: True
    convert: Callable[[Any, str], Any] = lambda value, name: value
    explain: Callable[[Any], str] = lambda value: ""
    classes: tuple[type, ...] = field(default=(), kw_only=True)
    inside: Callable[[Any, str, bool], None] = field(default=lambda value, where, in_file: None, kw_only=True)

    def check(self, value: Any, where: str, in_file: bool = True) -> None:
        """Raises Invalid if a value is not allowed. `where` is the path of the value in a file."""
        # The value may be an object of any class, so its comparisons and conversions may raise errors.
        try:
            is_allowed = bool(self.allows(value)) and not (in_file and self.classes and type(value) not in self.classes)
        except Exception:
            is_allowed = False
        if not is_allowed:
            # Only `checked` describes an argument, because `accepts` needs no text and the repr of a model takes long.
            raise Invalid(where, f"is {described(value)}; it must be {self.expected}" if in_file else "is not allowed")
        self.inside(value, where, in_file)

    def accepts(self, value: Any) -> bool:
        """Whether an argument is of this kind."""
        try:
            self.check(value, "", in_file=False)
        except Exception:  # e.g. raised by a user's list that has no length
            return False
        return True

    def checked(self, value: Any, where: str, name: str) -> Any:
        """Returns an argument after validation and conversion.

        Raises:
            InvalidInput: The argument is not of this kind. The message contains the function (`where`), the argument
                (`name`) and what to pass.
        """
        if not self.accepts(value):
            raise InvalidInput(f"{where}({name}={described(value)}): give {self.expected}{self.explain(value) or '.'}")
        return self.convert(value, f"{name} of {where}")


def checked(**stated: Kind) -> Callable[[Function], Function]:
    """Returns a decorator that validates a function's arguments, including its **keyword arguments.

    The kind of an argument is looked up in `stated`, then by its name in NAMED, and finally by its annotation. As in
    Python, an unknown argument raises TypeError. The message suggests the nearest name.
    """

    def decorate(function: Function) -> Function:
        signature, hints = inspect.signature(function), _hints_of_arguments(function)
        others = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), None)
        unknown = stated.keys() - signature.parameters.keys()
        assert others or not unknown, f"{function.__qualname__} has no argument {', '.join(unknown)}"
        annotated = [name for name in signature.parameters if name in hints and name != others]
        kinds = {**{name: named_kind(name, hints[name]) for name in annotated}, **stated}

        @wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            try:
                bound = signature.bind(*positional, **named)
            except TypeError as error:
                raise TypeError(_misused(function.__qualname__, signature, hints, named, error)) from None
            for values in (bound.arguments, bound.arguments.get(others, {}) if others else {}):
                for name in values.keys() & kinds.keys():
                    values[name] = kinds[name].checked(values[name], function.__qualname__, name)
            return function(*bound.args, **bound.kwargs)

        call.__dict__["kinds"] = kinds
        return call  # type: ignore[return-value]

    return decorate


def _hints_of_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    # The return annotation is left out, because it may be the class of the method, which does not exist yet.
    written = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=written), inspect.unwrap(function).__globals__)


def _misused(
    function: str, signature: inspect.Signature, hints: Mapping[str, Any], named: Mapping[str, Any], error: TypeError
) -> str:
    """Returns the message about a wrong call. For an unknown argument, the message suggests the nearest name."""
    unknown = [name for name in named if name not in signature.parameters]
    if not unknown or "unexpected" not in str(error):
        return f"{function}() {error}"
    # The name may be a field of a dataclass that is the type of another argument, e.g. `Columns`.
    for name, hint in hints.items():
        for kind in (hint, *get_args(hint)):
            if is_dataclass(kind) and unknown[0] in {each.name for each in fields(kind)}:
                given = f"{name}={getattr(kind, '__name__', name)}({unknown[0]}=...)"
                return f"{function}() has no argument {unknown[0]!r}: give {given}."
    return f"{function}() has no argument {unknown[0]!r}: {nearest(unknown[0], signature.parameters)}"


def require_fields(item: Any, by_type: Mapping[Any, Kind] | None = None, /, **kinds: Kind) -> None:
    """Validates the fields of a dataclass. Call it in `__post_init__`.

    The kind of a field is looked up in `kinds`, then by its type in `by_type`, then by its name in NAMED, and finally
    by its annotation.

    Raises:
        InvalidInput: A field has a value of another kind. The message names the class and the field.
    """
    typed = {field.name: by_type[field.type] for field in fields(item) if field.type in by_type} if by_type else {}
    for name, kind in {**_annotated(type(item)), **typed, **kinds}.items():
        # The converted value, e.g. a Python number for a NumPy number, is stored although the class is frozen.
        object.__setattr__(item, name, kind.checked(getattr(item, name), type(item).__name__, name))


def described(value: Any) -> str:
    """Returns a short text for any value: its shortened repr, or its type if the repr raises an error."""
    try:
        text = short_value(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text.encode("utf-8", "backslashreplace").decode()


# Numbers --------------------------------------------------------------------------------------------------------------


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: int, most: int = 2**31 - 1) -> Kind:
    """Returns a `Kind` for whole numbers from `least` to `most`, including NumPy integers but not bools."""
    ending = "" if most == 2**31 - 1 else f", at most {most}"
    smallest = {1: "a positive whole number"}.get(least, f"a whole number of {least} or more")
    expected = "a whole number" if least < 0 else f"{smallest}{ending}"

    def accepts(value: Any) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most

    def explain(value: Any) -> str:  # adds the upper limit to the message if `expected` does not contain it
        return f", at most {most}." if not ending and isinstance(value, Integral) and int(value) > most else ""

    return Kind(expected, accepts, lambda value, name: int(value), explain, classes=(int,))


def number(least: float, most: float = math.inf, expected: str = "", above: bool = True) -> Kind:
    """Returns a `Kind` for finite numbers from `least` to `most`. With `above`, `least` itself is excluded."""
    ending = "" if most == math.inf else f", at most {most:g}"
    expected = expected or f"a number {f'above {least:g}' if above else f'of {least:g} or more'}{ending}"

    def accepts(value: Any) -> bool:
        return _is_real(value) and (least < value if above else least <= value) and value <= most

    return Kind(expected, accepts, _float_of, classes=(int, float))


def or_percent(kind: Kind) -> Kind:
    """Returns a `Kind` that also allows percentages as text, e.g. "60%", and converts them to shares."""

    def read(value: Any) -> Any:
        is_percent = isinstance(value, str) and re.fullmatch(r"\s*\d+(\.\d+)?\s*%\s*", value)
        return float(value.strip()[:-1]) / 100 if is_percent else value

    return replace(
        kind,
        expected=f"{kind.expected}, or a text in percent, e.g. '60%'",
        allows=lambda value: kind.accepts(read(value)),
        convert=lambda value, name: kind.convert(read(value), name),
        classes=(),
    )


def finite(least: float = -LARGEST_FLOAT32, most: float = LARGEST_FLOAT32) -> Kind:
    """Returns a `Kind` for finite numbers from `least` to `most`, by default all numbers in the range of float32."""
    return number(least, most, f"a finite number in {least:g}..{most:g}", above=False)


def _float_of(value: Any, name: str) -> int | float:
    return value if isinstance(value, int) else float(value)


# REAL is the kind of measured values, which may be NaN or infinity.
REAL = Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool), _float_of)
COUNT = whole(1)
NATURAL = whole(0)
SEED = whole(0, LARGEST)
BATCH = whole(1, 65_536)
THREADS = whole(1, 1024)
RATE = Kind("a number between 0 and 1, without both ends", lambda value: _is_real(value) and 0 < value < 1)
BELOW_ONE = Kind("a number of 0 or more, below 1", lambda value: _is_real(value) and 0 <= value < 1)
FASTER = number(1.0, 1000.0, "a number above 1, e.g. 1.6 for 1.6 times the speed")
POSITIVE, NOT_NEGATIVE = number(0.0), number(0.0, above=False)
SIDE = whole(1, 65_536)  # a side of an image in pixels
SHARE = number(0.0, 1.0, "a share above 0, at most 1, e.g. 0.5")

# Other values ---------------------------------------------------------------------------------------------------------


def instance(expected: str, *classes: type) -> Kind:
    """Returns a `Kind` for instances of the given classes."""
    return Kind(expected, lambda value: isinstance(value, classes))


def one_of(*values: str | int) -> Kind:
    """Returns a `Kind` that only allows the given names or numbers."""

    def allows(value: Any) -> bool:
        # Without this test, True would be allowed where 1 is allowed, because True == 1 in Python.
        return isinstance(value, str | int) and not isinstance(value, bool) and value in values

    return Kind(f"one of {', '.join(map(str, values))}", allows)


def matching(pattern: str, expected: str) -> Kind:
    """Returns a `Kind` for texts that match a regular expression."""
    return Kind(expected, lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)))


def parsed(parse: Callable[[str], object]) -> Kind:
    """Returns a `Kind` for texts that `parse` accepts. If `parse` raises an AttnrxError, `check` raises Invalid."""

    def inside(value: Any, where: str, in_file: bool) -> None:
        try:
            parse(value)
        except AttnrxError as error:
            raise Invalid(where, f"is {described(value)}: {str(error).rstrip('.')}") from error

    return Kind("a text", lambda value: isinstance(value, str), inside=inside)


# Compositions ---------------------------------------------------------------------------------------------------------


def optional(kind: Kind) -> Kind:
    """Returns a `Kind` that also allows None, which is null in files."""

    def convert(value: Any, name: str) -> Any:
        return None if value is None else kind.convert(value, name)

    def inside(value: Any, where: str, in_file: bool) -> None:
        if value is not None:
            kind.check(value, where, in_file)

    return Kind(f"{kind.expected}, or None", convert=convert, explain=kind.explain, inside=inside)


def either(expected: str, *kinds: Kind) -> Kind:
    """Returns a `Kind` for values that any of several kinds allows."""

    def convert(value: Any, name: str) -> Any:
        return next(kind for kind in kinds if kind.accepts(value)).convert(value, name)

    return Kind(expected, lambda value: any(kind.accepts(value) for kind in kinds), convert)


def each(kind: Kind, expected: str = "", least: int = 0, most: int = 2**31, unique: bool = False) -> Kind:
    """Returns a `Kind` for lists of `least` to `most` values of one kind. Arguments become tuples.

    With `unique`, no value (string or number) may occur twice. `check` raises Invalid with the index of the first
    wrong value.
    """
    length = f"{least} or more" if most == 2**31 else f"{least} to {most}"
    expected = expected or f"a list of {least if least == most else length}"

    def inside(values: Any, where: str, in_file: bool) -> None:
        if not least <= len(values) <= most:
            raise Invalid(where, f"has {len(values)} values; it must be {expected}")
        for index, value in enumerate(values):
            kind.check(value, f"{where}[{index}]", in_file)
        first: dict[Any, int] = {}
        for index, value in enumerate(values if unique else ()):
            if first.setdefault(value, index) != index:
                same = f"{where}[{first[value]}]"
                raise Invalid(f"{where}[{index}]", f"is {described(value)}, as {same} is; give each once")

    return Kind(
        expected,
        lambda values: isinstance(values, list | tuple),
        lambda values, name: tuple(kind.convert(value, name) for value in values),
        classes=(list,),
        inside=inside,
    )


def record(
    fields: Mapping[str, Kind] | None = None,
    more: Mapping[str, Kind] | None = None,
    then: Callable[[Mapping[str, Any], str], None] | None = None,
    open: bool = False,
) -> Kind:
    """Returns a `Kind` for JSON objects with the required `fields` and the optional fields `more`.

    Other fields are only allowed if `open` is true. Once every single field is valid, `then` checks how they fit
    together. `check` raises Invalid with the path of the first field that is missing, unknown or wrong.
    """
    required, known = tuple(fields or ()), {**(fields or {}), **(more or {})}

    def inside(values: Mapping[str, Any], where: str, in_file: bool) -> None:
        for name in required:
            if name not in values:
                raise Invalid(below(where, name), "is missing")
        for name in values:
            if name not in known and not open:
                raise Invalid(below(where, name), f"is unknown; known are {', '.join(known)}")
        # `then` is called last, so it may rely on every single field being valid.
        for name in known.keys() & values.keys():
            known[name].check(values[name], below(where, name), in_file)
        if then is not None:
            then(values, where)

    return Kind("an object", lambda values: isinstance(values, Mapping), inside=inside)


def _every_number_is_finite(value: Any, where: str, in_file: bool) -> None:
    # The loop has its own stack instead of recursion, because files may nest deeper than Python's recursion limit.
    parts = [(value, where)]
    while parts:
        value, where = parts.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise Invalid(where, f"is {value}; it must be a finite number")
        if isinstance(value, Mapping):
            parts += [(part, below(where, name)) for name, part in value.items()]
        elif isinstance(value, list):
            parts += [(part, f"{where}[{index}]") for index, part in enumerate(value)]


# JSON has neither NaN nor infinity, but Python's parser accepts both, and turns too large numbers into infinity.
FINITE = Kind("a value of JSON", inside=_every_number_is_finite)


def bounded(most: int, counted: Collection[str] = ()) -> Kind:
    """Returns a `Kind` for JSON objects in which no integer, including nested ones, has a magnitude above `most`.

    The fields in `counted` may contain any integer.
    """
    integer = Kind(f"an integer in -{most}..{most}", lambda value: abs(value) <= most)

    def inside(value: Any, where: str, in_file: bool) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                if name not in counted:
                    inside(part, below(where, name), in_file)
        elif isinstance(value, list):
            for index, part in enumerate(value):
                inside(part, f"{where}[{index}]", in_file)
        elif isinstance(value, int):
            integer.check(value, where, in_file)

    return Kind("an object", lambda value: isinstance(value, Mapping), inside=inside)


def below(where: str, name: str) -> str:
    """Returns the path of a field in a file, e.g. "layers[3].keep" for the field "keep" of "layers[3]"."""
    return f"{where}.{name}" if where else name


# Texts, paths, objects ------------------------------------------------------------------------------------------------


def _is_text(value: Any) -> bool:
    # `encode` raises an error for a surrogate, which is not a character and cannot be stored in a file.
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value and bool(value.encode())


def _is_path(value: Any) -> bool:
    if not isinstance(value, str | Path) or not _is_text(str(value)):
        return False
    # The path of the current folder has no parts.
    longest = max((len(part.encode()) for part in Path(value).parts), default=0)
    return longest <= LONGEST_NAME and len(str(value).encode()) <= LONGEST_PATH


FLAG = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a text", _is_text)
ANY_TEXT = Kind("a text", lambda value: isinstance(value, str))  # for files, in which a text may be empty
JSON_OBJECT = record(open=True)
PATH = Kind("a path, as a text or a pathlib.Path", _is_path)
MODEL = instance("a model (a torch.nn.Module), e.g. attnrx.load(FOLDER)", nn.Module)
DEVICE = Kind("a device that torch finds here, e.g. 'cpu'", lambda value: _is_device(value))
IMAGES = Kind(
    "images: a DataLoader, a dataset, batches, or a tensor [images, channels, height, width]",
    lambda data: (
        not isinstance(data, str | bytes | type | Number | np.generic)
        and any(hasattr(data, name) for name in ("__getitem__", "__iter__", "batches"))
    ),
)
# ANY is for values that a function validates itself, with its own message: datasets, rules, names of models.
ANY = Kind("")


def _is_device(value: Any) -> bool:
    if not isinstance(value, str | torch.device):
        return False
    try:
        device = torch.device(value)
    except RuntimeError:
        return False
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    return (device.index or 0) < counts.get(device.type, 0)


# The user's code ------------------------------------------------------------------------------------------------------


@contextmanager
def user_code(what: str, error_class: type[AttnrxError] = UserCodeError) -> Iterator[None]:
    """Turns errors of user code in the context into a UserCodeError that names the code (`what`).

    Errors of attnrx are not changed. SystemExit is also turned into a UserCodeError, because it would otherwise end the
    process with a misleading exit code.

    Raises:
        UserCodeError: The user's code raised an exception, which is the `__cause__`. If you pass `error_class`, this
            class is raised instead.
    """
    try:
        yield
    except AttnrxError:
        raise
    except (Exception, SystemExit) as error:
        raise error_class(f"{what} raised {type(error).__name__}: {described_error(error)}") from error


def described_error(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    try:
        return (str(error).strip().splitlines() or ["(without a message)"])[0][:300]
    except Exception:
        return "(without a message)"


def _guarded(function: Any, name: str) -> Any:
    # A function is only guarded once, even if a public function passes it on to other public functions.
    if getattr(function, "is_guarded", False):
        return function

    @wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        with user_code(f"the function {name}, {getattr(function, '__qualname__', type(function).__name__)},"):
            return function(*positional, **named)

    call.__dict__["is_guarded"] = True
    return call


# A function of the kind CALLBACK raises its exceptions as UserCodeError. A FUNCTION raises them unchanged, because its
# caller handles them.
CALLBACK, FUNCTION = Kind("a function", callable, _guarded), Kind("a function", callable)


# Annotations ----------------------------------------------------------------------------------------------------------


@cache
def _annotated(cls: type) -> Mapping[str, Kind]:
    """Returns the kind of every dataclass field for which the name or the annotation defines a kind."""
    hints = get_type_hints(cls)
    kinds = {field.name: named_kind(field.name, hints[field.name]) for field in fields(cls) if field.init}
    return {name: kind for name, kind in kinds.items() if kind is not ANY}


def named_kind(name: str, hint: Any) -> Kind:
    """Returns the kind of an argument or a field: by its name if NAMED contains the name, else by its annotation."""
    kind = NAMED.get(name)
    if kind is None:
        return kind_of(hint)
    return optional(kind) if NoneType in get_args(hint) else kind


def kind_of(hint: Any) -> Kind:
    """Returns the kind for an annotation. Numbers must be finite, and texts must not be empty."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # `str` is ignored if `Path` is also allowed, because the kind of paths includes texts.
        kinds = [kind_of(part) for part in parts if part is not NoneType and not (part is str and Path in parts)]
        if ANY in kinds:
            return ANY
        several = kinds[0] if len(kinds) == 1 else either(" or ".join(kind.expected for kind in kinds), *kinds)
        return optional(several) if NoneType in parts else several
    if origin is Literal:
        return one_of(*parts)
    if origin in (tuple, list, Sequence):
        several = kind_of(parts[0])
        expected = f"several, each {several.expected or 'a value'}"
        if parts[-1] is Ellipsis or origin is not tuple:
            return each(several, expected)
        return each(several, expected, len(parts), len(parts))
    if hasattr(hint, "array_type"):  # a jaxtyping annotation checks the dtype and the number of axes
        numbers = _NUMBERS[hint.dtypes[-1]]
        return instance(f"a tensor [{', '.join(hint.dim_str.split())}] of {numbers}", hint)
    cls = origin if origin is not None else hint
    if cls in _SIMPLE or not isinstance(cls, type):
        return _SIMPLE.get(cls, ANY)
    example = getattr(cls, "example", None)  # code that creates an instance, for error messages
    return instance(f"an instance of {cls.__name__}" + (f", e.g. {example}" if example else ""), cls)


# The words for a tensor's numbers in messages, by the last dtype that a jaxtyping annotation allows.
_NUMBERS = {
    "float64": "floating-point numbers",
    "int64": "whole numbers",
    "uint8": "bytes (uint8)",
    "bool_": "booleans",
}

_SIMPLE: Mapping[Any, Kind] = {
    bool: FLAG,
    int: whole(-(2**31)),
    float: Kind("a finite number", _is_real, _float_of, classes=(int, float)),
    str: TEXT,
    NoneType: Kind("None", lambda value: value is None),
    Path: PATH,
    nn.Module: MODEL,
    Any: ANY,
    Callable: FUNCTION,
    Mapping: instance("a dictionary", Mapping),
    dict: instance("a dictionary", dict),
}

# The kinds of arguments that have the same meaning in all functions.
NAMED = {"batch": BATCH, "batch_size": BATCH, "device": DEVICE, "log": CALLBACK, "seed": SEED, "threads": THREADS}
