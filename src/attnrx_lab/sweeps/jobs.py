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

from attnrx.support.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.support.validation import JSON_OBJECT, Record, Text, require_regular, validated

Label = str | int | float | bool | None
Words = tuple[str, ...]

OUT = "out"  # {out} is the folder of the job, which is known when it runs
FORM = 'command = "compare {model} --seed {seed} ...", and under [grid] e.g. seed = [0, 1, 2]'
COLUMNS = ("metric", "value", "low", "high", "n", "unit")  # of every number in a CSV of the results, beside its axes
MOST_JOBS = 100_000  # more are a mistake in an axis, and would fill the disk
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
    """Reads the jobs of a sweep from TOML: `command`, a text, and `grid`, the values of its axes.

    Raises:
        InvalidInput: The file is unreadable or has another form.
    """
    try:
        record = tomllib.loads(require_regular(path).read_text(encoding="utf-8"))
        validated(record, RECORD, path)
    except (OSError, ValueError, RecursionError, CheckpointError) as error:
        raise InvalidInput(f"{path} cannot be read as a sweep ({error}); it has {FORM}.") from error
    return grid_jobs(record["command"], record.get("grid", {}))


def grid_jobs(command: str, grid: Mapping[str, Any]) -> tuple[Job, ...]:
    """Fills a command of attnrx with every combination of values, the last axis changing fastest.

    {AXIS} is replaced by a value of that axis, {out} by a folder of the job; then the command is cut into words, so
    '{AXIS}' in quotes stays one word. Literal braces are doubled: {{share}} in a command is the {share} of a rule. An
    axis is a list of texts and numbers, or a table of names and such values.

    Raises:
        InvalidInput: The command or the values of an axis are invalid, or there are too many combinations.
        UnknownName: The command has an axis without values.
    """
    axes = {name: _values(name, axis) for name, axis in grid.items()}
    count = math.prod(map(len, axes.values()))
    if not command.strip() or not 0 < count <= MOST_JOBS:
        raise InvalidInput(
            f"a sweep has a command and 1 to {MOST_JOBS:,} combinations of values, not {count:,}: {FORM}."
        )
    jobs = []
    try:
        used = {name for _, name, _, _ in Formatter().parse(command) if name is not None}
        for name in used - axes.keys() - {OUT}:
            doubled = f"{{{{{name}}}}}"
            raise UnknownName(f"axis in the command (braces of its own are doubled, {doubled})", name, [*axes, OUT])
        for name in sorted(axes.keys() & set(COLUMNS)):
            raise InvalidInput(f"the axis {name} has the name of a column of the results; give it another one.")
        for name in axes.keys() - used:
            raise InvalidInput(f"the axis {name} is nowhere in the command; write {{{name}}} where its values go.")
        for point in itertools.product(*(values.items() for values in axes.values())):
            values = {name: value for name, (_, value) in zip(axes, point, strict=True)}
            # {out} stays in the words, so that a job has the same id in every folder.
            words = shlex.split(command.format_map({OUT: f"{{{OUT}}}", **values}))
            labels = {name: label for name, (label, _) in zip(axes, point, strict=True)}
            # The name of the program may be written, as in a shell.
            job = Job(tuple(words[1:] if words[:1] == ["attnrx"] else words), labels)
            if not job.words:
                raise InvalidInput(f"the command {command!r} has no word for {labels}; write a command of attnrx.")
            jobs.append(job)
    except ValueError as error:  # a quote or a brace that is not closed
        raise InvalidInput(f"the command {command!r} cannot be cut into words: {str(error).lower()}.") from error
    return tuple(jobs)


def _values(name: str, axis: Any) -> dict[Label, str]:
    table = {value: value for value in axis} if _plain(axis) else axis
    if not isinstance(table, Mapping) or not _plain(list(table.values())):
        raise InvalidInput(
            f"the axis {name} is {axis!r}; give a list of texts and numbers, or a table of names and such values."
        )
    # The booleans of TOML, as they are written in rules and policies.
    return {label: str(value).lower() if isinstance(value, bool) else str(value) for label, value in table.items()}


def _plain(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str | int | float) for value in values)
