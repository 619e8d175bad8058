"""The jobs of a sweep: one command as text, filled with every combination of the values of its axes."""

import hashlib
import itertools
import json
import math
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from attnrx.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.serialization.validation import JSON_OBJECT, Record, Text, require_regular, validated

Label = str | int | float | bool | None
Words = tuple[str, ...]

OUT = "out"  # {out} is the folder of the job, which is known when it runs
FORM = 'command = "compare {model} --seed {seed} ...", and under [grid] e.g. seed = [0, 1, 2]'
MOST_JOBS = 100_000  # more are a mistake in an axis, and would fill the storage
RECORD = Record({"command": Text()}, {"grid": JSON_OBJECT})


@dataclass(frozen=True)
class Job:
    """The words of one command, and the axis values that they were made from.

    Two jobs of the same words are the same job, whatever their labels are.
    """

    words: Words
    labels: Mapping[str, Label] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A hash of the words; 64 bits name a folder."""
        return hashlib.sha256(json.dumps(self.words).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        """The labels in one line, or the words where there are none."""
        return " ".join(f"{name}={value}" for name, value in self.labels.items()) or " ".join(self.words)


def load_jobs(path: Path | str) -> tuple[Job, ...]:
    """Reads the jobs of a sweep from TOML: `command`, a text, and `grid`, the values of its axes."""
    try:
        record = tomllib.loads(require_regular(path).read_text(encoding="utf-8"))
        validated(record, RECORD, path)
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise InvalidInput(f"{path} cannot be read as a sweep ({error}); it has {FORM}.") from error
    return grid_jobs(record["command"], record.get("grid", {}))


def grid_jobs(command: str, grid: Mapping[str, Any]) -> tuple[Job, ...]:
    """Fills a command of attnrx with every combination of values, the last axis changing fastest.

    {AXIS} is replaced by a value of that axis, {out} by a folder of the job. A word that is {AXIS} alone becomes all
    the words of the value. Literal braces are doubled: {{share}} in a command is the {share} of a rule. An axis is a
    list of values, or a table of names and values; a value is a text, a number, or (in a table) a list of words.
    """
    axes = {name: _values(name, given) for name, given in grid.items()}
    try:
        words = shlex.split(command.strip().removeprefix("attnrx "))
        used = {name for word in words for _, name, _, _ in Formatter().parse(word) if name is not None}
    except ValueError as error:  # a quote or a brace that is not closed
        raise InvalidInput(f"the command {command!r} cannot be cut into words: {str(error).lower()}.") from error
    if not words or not all(axes.values()):
        raise InvalidInput(f"a sweep has a command and at least one value for every axis: {FORM}.")
    for name in used - axes.keys() - {OUT}:
        raise UnknownName(f"axis in the command (braces of its own are doubled, {{{{{name}}}}})", name, [*axes, OUT])
    for name in axes.keys() - used:
        raise InvalidInput(f"the axis {name} is nowhere in the command; write {{{name}}} where its values go.")
    count = math.prod(map(len, axes.values()))
    if count > MOST_JOBS:
        raise InvalidInput(f"the axes have {count:,} combinations; a sweep has at most {MOST_JOBS:,} jobs.")
    jobs = []
    for chosen in itertools.product(*(values.items() for values in axes.values())):
        labels = {name: label for name, (label, _) in zip(axes, chosen, strict=True)}
        values = {name: own for name, (_, own) in zip(axes, chosen, strict=True)}
        jobs.append(Job(tuple(part for word in words for part in _filled(word, values)), labels))
    return tuple(jobs)


def _values(name: str, given: Any) -> dict[Label, Words]:
    table = given if isinstance(given, Mapping) else None
    if table is None:
        if not isinstance(given, list) or not all(isinstance(value, str | int | float) for value in given):
            raise InvalidInput(
                f"the axis {name} is {given!r}; give a list of texts and numbers, or a table of names and values."
            )
        table = {value: value for value in given}
    return {label: _words(value) for label, value in table.items()}


def _words(value: Any) -> Words:
    parts = value if isinstance(value, list) else [value]
    return tuple(str(part).lower() if isinstance(part, bool) else str(part) for part in parts)


def _filled(word: str, values: Mapping[str, Words]) -> Words:
    if word[:1] == "{" and word[1:-1] in values:
        return values[word[1:-1]]
    return (word.format_map({OUT: f"{{{OUT}}}", **{name: " ".join(own) for name, own in values.items()}}),)
