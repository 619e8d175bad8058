"""The jobs of a sweep, which are commands, and the numbers that each of them computes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.errors import InvalidInput

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
