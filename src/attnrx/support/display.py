"""Short texts that show large objects in consoles and notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from typing import Any

import torch

# The maximum number of characters of an object's text and of a value's text, and of items shown from a collection.
MAX_OBJECT, MAX_VALUE, MAX_ITEMS = 1500, 160, 6


class Sentence(str):
    """A text that is also callable: `evidence.summary` and `evidence.summary()` return the same text."""

    __slots__ = ()

    def __call__(self) -> str:
        return str(self)


# A diagnosis or prescription has thousands of numbers, and a dataclass's usual repr would print all of them.
class Displayed:
    """A base class for dataclasses (with repr=False). It shows shapes instead of tensors, and shortens long values."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in _shown(self))
        return _cut(f"{type(self).__name__}({shown})", MAX_OBJECT)

    def _repr_html_(self) -> str:
        """Returns a table of the fields, for notebooks."""
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _shown(self))
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def _shown(item: Any) -> list[tuple[str, str]]:
    return [(field.name, short_value(getattr(item, field.name))) for field in fields(item)]


def short_value(value: Any, depth: int = 2) -> str:
    """Returns a text of at most MAX_VALUE characters that describes a value, e.g. the shape of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        parts = (
            [f"{key!r}: {short_value(item, depth - 1)}" for key, item in list(value.items())[:MAX_ITEMS]]
            if depth
            else []
        )
        return _cut("{" + ", ".join(_with_rest(parts, len(value))) + "}", MAX_VALUE)
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [short_value(item, depth - 1) for item in value[:MAX_ITEMS]] if depth else []
        return _cut("(" + ", ".join(_with_rest(parts, len(value))) + ")", MAX_VALUE)
    return _cut(repr(value), MAX_VALUE)


def _with_rest(parts: list[str], count: int) -> list[str]:
    return parts if len(parts) == count else [*parts, f"... {count} in total" if parts else f"{count} items"]


def _cut(text: str, maximum: int) -> str:
    # The last character is kept, because it is the closing bracket of a collection.
    return text if len(text) <= maximum else f"{text[: maximum - 5]} ...{text[-1]}"
