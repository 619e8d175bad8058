"""Progress reporters of a training run."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outline:
    """The size of a run: `step` of its `steps` steps are already done."""

    epochs: int
    steps_per_epoch: int
    step: int

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch


class Reporter(ABC):
    """Callbacks for the events of a run, called in the first process only."""

    @abstractmethod
    def started(self, outline: Outline) -> None:
        """Called before the first step."""

    @abstractmethod
    def stepped(self, step: int, loss: float) -> None:
        """Called after steps; `loss` is the mean of the epoch so far."""

    @abstractmethod
    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Called after every epoch; `record` is its line of the history."""

    @abstractmethod
    def ended(self) -> None:
        """Called at the end of the run, finished or not."""


class Silent(Reporter):
    """A reporter without output."""

    def started(self, outline: Outline) -> None:
        pass

    def stepped(self, step: int, loss: float) -> None:
        pass

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        pass

    def ended(self) -> None:
        pass


class PlainLines(Reporter):
    """Writes one line per epoch to stderr, and one in between after `every` seconds without output."""

    def __init__(self, every: float = 30.0):
        self._every = every
        self._outline = Outline(0, 0, 0)
        self._spoke = self._began = 0.0

    def started(self, outline: Outline) -> None:
        self._outline = outline
        self._spoke = self._began = time.monotonic()
        where = f"resuming at step {outline.step} of {outline.steps}" if outline.step else f"{outline.steps} steps"
        self._say(f"training {outline.epochs} epochs of {outline.steps_per_epoch} steps: {where}")

    def stepped(self, step: int, loss: float) -> None:
        if time.monotonic() - self._spoke >= self._every:
            rate = (step - self._outline.step) / (time.monotonic() - self._began)
            left = (self._outline.steps - step) / rate / 60
            self._say(
                f"step {step}/{self._outline.steps}  loss {loss:.4f}  {rate:.2f} steps/s  about {left:.0f} min left"
            )

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        self._say(f"epoch {record['epoch']}/{self._outline.epochs}  {summary(record)}")

    def ended(self) -> None:
        pass

    def _say(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        self._spoke = time.monotonic()


class ProgressBars(Reporter):
    """A progress bar over all steps on a terminal, and one line per epoch above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), refresh_per_second=4)
        self._outline = Outline(0, 0, 0)
        self._task = self._progress.add_task("training", total=None)

    def started(self, outline: Outline) -> None:
        self._outline = outline
        self._progress.update(self._task, total=outline.steps, completed=outline.step)
        self._progress.start()

    def stepped(self, step: int, loss: float) -> None:
        epoch = min(step // self._outline.steps_per_epoch + 1, self._outline.epochs)
        label = f"epoch {epoch}/{self._outline.epochs}  loss {loss:.4f}"
        self._progress.update(self._task, completed=step, description=label)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        self._progress.console.print(
            f"epoch {record['epoch']}/{self._outline.epochs}  {summary(record)}", highlight=False
        )

    def ended(self) -> None:
        self._progress.stop()


def default_reporter() -> Reporter:
    """Returns progress bars on a terminal, and plain lines elsewhere."""
    return ProgressBars() if sys.stderr.isatty() else PlainLines()


def summary(record: Mapping[str, Any]) -> str:
    """Returns the main numbers of an epoch's record as text."""
    return (
        f"loss {record['loss']:.4f}  train {record['accuracy']:.2%}  validation {record['validation_accuracy']:.2%}  "
        f"{record['images_per_second']:.0f} images/s"
    )


class Several(Reporter):
    """Forwards all events to several reporters."""

    def __init__(self, *reporters: Reporter):
        self._reporters = reporters

    def started(self, outline: Outline) -> None:
        for reporter in self._reporters:
            reporter.started(outline)

    def stepped(self, step: int, loss: float) -> None:
        for reporter in self._reporters:
            reporter.stepped(step, loss)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        for reporter in self._reporters:
            reporter.epoch_ended(record)

    def ended(self) -> None:
        for reporter in self._reporters:
            reporter.ended()
