"""A sweep as text: one command, and the values of its axes, in every combination; and its jobs."""

import hashlib
import itertools
import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnrx.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.serialization.storage import read_json
from attnrx.serialization.validation import (
    JSON_OBJECT,
    Anything,
    Items,
    Record,
    Text,
    below,
    require_regular,
    validated,
)

Label = str | int | float | bool | None


@dataclass(frozen=True)
class Job:
    """The words of one command, and the axis values that they were made from.

    Two jobs of the same words are the same job, whatever their labels are.
    """

    words: tuple[str, ...]
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A hash of the words."""
        # 64 bits name a folder, and do not collide among MOST_JOBS.
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The labels in one line, or the words where there are none."""
        return " ".join(f"{name}={value}" for name, value in self.labels.items()) or " ".join(self.words)


@dataclass(frozen=True)
class Result:
    """One number of a job, with its 95 % interval and count where they are known."""

    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    unit: str = ""
    labels: Mapping[str, Label] = field(default_factory=dict)


def require_job_labels(labels: Mapping[str, Any]) -> dict[str, Label]:
    """Returns the labels; raises InvalidInput for a value that is not a text, a number or a boolean."""
    for name, value in labels.items():
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidInput(f"{name}={value!r}: a label is a text, a number, true or false.")
    return dict(labels)


OUT = "out"  # {out} is the folder of the job, which is known when it runs
FORM = 'command = "compare {model} --seed {seed} ...", and under [grid] e.g. seed = [0, 1, 2]'

MOST_JOBS = 100_000  # more are a mistake in an axis, and would fill the storage


def _check_command(value: Mapping[str, Any], where: str) -> None:
    if not isinstance(value["command"], str):
        Items(Text(), 1).check(value["command"], below(where, "command"))


RECORD = Record({"command": Anything()}, {"grid": JSON_OBJECT}, then=_check_command)

Words = tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """One value of an axis: its words in the command, and its name in the results."""

    label: Label
    words: Words


@dataclass(frozen=True)
class Sweep:
    """The words of a command of attnrx, in which {AXIS} is replaced by a value of that axis and {out} by a folder.

    A word that is {AXIS} alone becomes all the words of the value. Literal braces are doubled: {{share}} in a command
    is the {share} of a rule. Values are inserted unchanged.
    """

    command: Words
    grid: Mapping[str, tuple[Value, ...]]

    def __post_init__(self):
        if not self.command or not all(self.grid.values()):
            raise InvalidInput(f"a sweep has a command and at least one value for every axis: {FORM}.")
        text = " ".join(self.command).replace("{{", "").replace("}}", "")  # doubled braces are literal
        used = set(re.findall(r"\{(\w+)\}", text))
        for name in used - self.grid.keys() - {OUT}:
            raise UnknownName(
                f"axis in the command (braces of its own are doubled, {{{{{name}}}}})", name, [*self.grid, OUT]
            )
        for name in self.grid.keys() - used:
            raise InvalidInput(f"the axis {name} is nowhere in the command; write {{{name}}} where its values go.")

    @classmethod
    def load(cls, path: Path | str) -> "Sweep":
        """Reads TOML or JSON: `command`, as one text or a list of words, and `grid`."""
        path = Path(path)
        try:
            is_json = path.suffix == ".json"
            record = read_json(path) if is_json else tomllib.loads(require_regular(path).read_text(encoding="utf-8"))
            validated(record, RECORD, path)
        except (OSError, ValueError, RecursionError, CheckpointError) as error:
            raise InvalidInput(f"{path} cannot be read as a sweep ({error}); it has {FORM}.") from error
        return cls.of(record["command"], record.get("grid", {}))

    @classmethod
    def of(cls, command: str | Sequence[str], grid: Mapping[str, Any]) -> "Sweep":
        """Makes a sweep of plain values.

        An axis is a list of values, or a table of names and values; a value is a text, a number, or a list of words.
        """
        words = _split(command) if isinstance(command, str) else [str(word) for word in command]
        if words[:1] == ["attnrx"]:
            words = words[1:]
        return cls(tuple(words), {name: _values(name, given) for name, given in grid.items()})

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Every combination, the last axis changing fastest."""
        count = math.prod(map(len, self.grid.values()))
        if count > MOST_JOBS:
            raise InvalidInput(f"the axes have {count:,} combinations; a sweep has at most {MOST_JOBS:,} jobs.")
        chosen = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return tuple(
            Job(
                tuple(word for part in self.command for word in _filled(part, values)),
                {name: value.label for name, value in values.items()},
            )
            for values in chosen
        )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:  # a quote that is not closed
        raise InvalidInput(f"the command {command!r} cannot be cut into words: {str(error).lower()}.") from error


def _values(name: str, given: Any) -> tuple[Value, ...]:
    if isinstance(given, Mapping):
        return tuple(Value(label, _words(value)) for label, value in given.items())
    if not isinstance(given, list | tuple):
        raise InvalidInput(f"the axis {name} is {given!r}; give a list of values, or a table of names and values.")
    labels = require_job_labels({f"{name}[{number}]": value for number, value in enumerate(given)})
    return tuple(Value(value, _words(value)) for value in labels.values())


def _words(value: Any) -> Words:
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple("true" if part is True else "false" if part is False else str(part) for part in parts)


def _filled(word: str, values: Mapping[str, Value]) -> Words:
    alone = re.fullmatch(r"\{(\w+)\}", word)
    if alone and alone[1] in values:
        return values[alone[1]].words

    def fill(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        return " ".join(values[found[1]].words) if found[1] in values else found[0]

    return (re.sub(r"\{\{|\}\}|\{(\w+)\}", fill, word),)
