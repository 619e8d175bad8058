"""Draws that depend on a number alone, and values and texts that are odd everywhere."""

import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from support import wrong_arguments

Item = TypeVar("Item")


class Colour(Enum):
    """A choice of the user's."""

    RED = "red"


class Text(str):
    """A text of a class of the user's."""


class Whole(int):
    """A number of a class of the user's."""


class Stubborn(wrong_arguments.Stubborn):
    """One whose length and items raise, too."""

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")


def _exiting(*_: Any, **__: Any) -> Any:
    raise SystemExit(7)


def _endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# Made anew for every case: a call may change what it is given.
VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "2": lambda: 2,
    "2^31": lambda: 2**31,
    "2^63": lambda: 2**63,
    "10^400": lambda: 10**400,
    "0.5": lambda: 0.5,
    "-0.0": lambda: -0.0,
    "1e308": lambda: 1e308,
    "5e-324": lambda: 5e-324,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "complex": lambda: 1 + 2j,
    "fraction": lambda: Fraction(1, 2),
    "decimal": lambda: Decimal("0.5"),
    "decimal nan": lambda: Decimal("sNaN"),
    "int64": lambda: np.int64(2),
    "uint8": lambda: np.uint8(255),
    "float32": lambda: np.float32(0.5),
    "numpy nan": lambda: np.float64("nan"),
    "numpy bool": lambda: np.bool_(True),
    "numpy text": lambda: np.str_("a"),
    "array of no axis": lambda: np.array(1),
    "empty array": lambda: np.array([]),
    "array": lambda: np.zeros(3),
    "array of objects": lambda: np.array([None, object()]),
    "datetime": lambda: np.datetime64("2020-01-01"),
    "tensor of one": lambda: torch.tensor(1),
    "tensor of nan": lambda: torch.tensor(float("nan")),
    "empty tensor": lambda: torch.zeros(0),
    "tensor": lambda: torch.zeros(3),
    "meta tensor": lambda: torch.zeros(3, device="meta"),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "tensor of texts": lambda: [torch.zeros(2), "a"],
    "empty text": lambda: "",
    "space": lambda: " ",
    "newline": lambda: "a\nb",
    "digit": lambda: "5",
    "word": lambda: "nothing",
    "zero byte": lambda: "a\0b",
    "surrogate": lambda: "a\ud800b",
    "long text": lambda: "x" * 5000,
    "long path": lambda: "a/" * 2500,
    "umlaut": lambda: "müller",
    "emoji": lambda: "\U0001f642",
    "right to left": lambda: "\u202eabc",
    "combining": lambda: "e\u0301",
    "percent": lambda: "%s %d {0} {name}",
    "text subclass": lambda: Text("a"),
    "int subclass": lambda: Whole(2),
    "enum": lambda: Colour.RED,
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "empty list": list,
    "list of one": lambda: [1],
    "list of halves": lambda: [0.5, 0.5],
    "list of None": lambda: [None],
    "list in itself": _endless,
    "long list": lambda: [0.5] * 10_000,
    "tuple": lambda: (1, 2),
    "empty tuple": tuple,
    "empty dictionary": dict,
    "dictionary": lambda: {"a": object()},
    "dictionary of numbers": lambda: {1: 2},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "iterator": lambda: iter([1, 2]),
    "generator": lambda: (number for number in range(2)),
    "function": lambda: wrong_arguments.raising,
    "function that exits": lambda: _exiting,
    "class": lambda: int,
    "exception": lambda: ValueError("a"),
    "object": object,
    "stubborn": Stubborn,
    "module": nn.Identity,
    "linear": lambda: nn.Linear(2, 2),
    "no path": lambda: Path("/proc/nowhere/at/all"),
    "here": lambda: Path(),
    "root": lambda: Path("/"),
    "device file": lambda: Path("/dev/null"),
    "home": lambda: "~/nothing",
    "device": lambda: torch.device("meta"),
    "dtype": lambda: torch.float32,
}

# Insertions into texts that were valid.
PIECES = (
    *("", " ", "\t", "\n", "-", "--", "+", "=", "==", ":", "::", ",", ";", "(", ")", "()", "((", "[", "@", "/", "&"),
    *("|", "%", "x", "0", "-1", "9" * 30, "9" * 400, "1e999", "-1e-9", "nan", "inf", "-inf", "None", "none", "true"),
    *("False", "é", "٣", "\0", "\r", "\ud800", "{share}", "{", "}", "..", "../", "~", "'", '"', "\\", "#", "$(ls)"),
    *(
        "a" * 300,
        "(" * 60,
        "0x10",
        "1_0",
        "1.2.3",
        "0.0",
        "1e-320",
        "\u202e",
        "\ufeff",
        "\uff1a",
        "\uff10\uff0e\uff15",
        "\U0001f642",
    ),
    *("½", "%s", "{0}", "<b>", "--help", "-h", "@every", "1pt", "50%", "pt"),
)


def generator(*words: object) -> random.Random:
    """Returns a generator that is the same in every process."""
    return random.Random(" ".join(map(str, words)))


def shuffled(items: Sequence[Item], name: str) -> list[Item]:
    """Returns all items in an order that depends on the name."""
    found = list(items)
    generator(name, len(found)).shuffle(found)
    return found


def edited(text: str, draw: random.Random, most: int = 2) -> str:
    """Returns a text with one or a few edits: a piece is inserted, deleted, replaced or repeated."""
    for _ in range(draw.randint(1, most)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 1, 1, 3)))
        middle = draw.choice(PIECES) if draw.random() < 0.75 else text[start:end] * 2
        text = text[:start] + middle + text[end:]
    return text
