"""Progress reporters of a training run."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnrx.support.arguments import user_code
from attnrx.support.progress import duration


@dataclass(frozen=True)
class Outline:
    """The size of a run: `step` of its `steps` steps are already done."""

    epochs: int
    steps_per_epoch: int
    step: int

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch


class Reporter:
    """Callbacks for the events of a run, called in the first process only; each does nothing unless overridden, so that
    this class is the reporter without output.
    """

    def started(self, outline: Outline) -> None:
        """Called before the first step."""

    def stepped(self, step: int, loss: float) -> None:
        """Called after steps; `loss` is the mean of the epoch so far."""

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Called after every epoch; `record` is its line of the history."""

    def ended(self) -> None:
        """Called at the end of the run, finished or not."""


class Console(Reporter):
    """Writes one line per epoch to stderr, because stdout is for results, and one after `every` seconds without any."""

    def __init__(self, every: float = 30.0):
        self._every = every
        self._outline = Outline(0, 0, 0)
        self._last_line = self._began = 0.0

    def started(self, outline: Outline) -> None:
        self._outline = outline
        self._last_line = self._began = time.monotonic()
        where = f"resuming at step {outline.step} of {outline.steps}" if outline.step else f"{outline.steps} steps"
        self._write(f"training {outline.epochs} epochs of {outline.steps_per_epoch} steps: {where}")

    def stepped(self, step: int, loss: float) -> None:
        if time.monotonic() - self._last_line >= self._every:
            # Without the steps of an earlier run, which took none of this time.
            rate = (step - self._outline.step) / (time.monotonic() - self._began)
            left = duration((self._outline.steps - step) / rate)
            self._write(f"step {step}/{self._outline.steps}  loss {loss:.4f}  {rate:.2f} steps/s  about {left} left")

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        shares = (("train", record["accuracy"]), ("validation", record["validation_accuracy"]))
        measured = "".join(f"{name} {share:.2%}  " for name, share in shares if share is not None)
        self._write(
            f"epoch {record['epoch']}/{self._outline.epochs}  loss {record['loss']:.4f}  {measured}"
            f"{record['images_per_second']:.0f} images/s"
        )

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        self._last_line = time.monotonic()


class Guarded(Reporter):
    """Forwards all events to a user's reporter; what it raises becomes a UserCodeError with its name and method."""

    def __init__(self, reporter: Reporter):
        for event in ("started", "stepped", "epoch_ended", "ended"):
            setattr(self, event, _guarded(reporter, event))


def _guarded(reporter: Reporter, event: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        with user_code(f"{event} of the reporter {type(reporter).__name__}"):
            getattr(reporter, event)(*arguments)

    return call
