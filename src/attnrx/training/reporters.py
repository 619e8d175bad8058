"""Whom a run tells how it is going."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outline:
    """What is about to happen: `step` steps of `steps` are done already."""

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
        """The first step is about to be made."""

    @abstractmethod
    def stepped(self, step: int, loss: float) -> None:
        """So many steps are done; `loss` is the mean of the epoch so far."""

    @abstractmethod
    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """An epoch is done; `record` is its line of the history."""

    @abstractmethod
    def ended(self) -> None:
        """The run is over, finished or not."""


class Silent(Reporter):
    """Says nothing."""

    def started(self, outline: Outline) -> None:
        """Nothing."""

    def stepped(self, step: int, loss: float) -> None:
        """Nothing."""

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def ended(self) -> None:
        """Nothing."""


class PlainLines(Reporter):
    """One line an epoch, and one in between when nothing was printed for `every` seconds; to the standard error
    stream."""

    def __init__(self, every: float = 30.0):
        self._every = every
        self._outline = Outline(0, 0, 0)
        self._spoke = self._began = 0.0

    def started(self, outline: Outline) -> None:
        """Says where the run starts."""
        self._outline = outline
        self._spoke = self._began = time.monotonic()
        where = f"resuming at step {outline.step} of {outline.steps}" if outline.step else f"{outline.steps} steps"
        self._say(f"training {outline.epochs} epochs of {outline.steps_per_epoch} steps: {where}")

    def stepped(self, step: int, loss: float) -> None:
        """Says how far the run is, now and then."""
        if time.monotonic() - self._spoke >= self._every:
            rate = (step - self._outline.step) / (time.monotonic() - self._began)
            left = (self._outline.steps - step) / rate / 60
            self._say(
                f"step {step}/{self._outline.steps}  loss {loss:.4f}  {rate:.2f} steps/s  about {left:.0f} min left"
            )

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Says what the epoch gave."""
        self._say(f"epoch {record['epoch']}/{self._outline.epochs}  {summary(record)}")

    def ended(self) -> None:
        """Nothing."""

    def _say(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        self._spoke = time.monotonic()


class ProgressBars(Reporter):
    """A bar over all steps on a terminal, and a line an epoch above it."""

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
        """Draws the bar."""
        self._outline = outline
        self._progress.update(self._task, total=outline.steps, completed=outline.step)
        self._progress.start()

    def stepped(self, step: int, loss: float) -> None:
        """Moves the bar."""
        epoch = min(step // self._outline.steps_per_epoch + 1, self._outline.epochs)
        label = f"epoch {epoch}/{self._outline.epochs}  loss {loss:.4f}"
        self._progress.update(self._task, completed=step, description=label)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Writes the epoch above the bar."""
        self._progress.console.print(
            f"epoch {record['epoch']}/{self._outline.epochs}  {summary(record)}", highlight=False
        )

    def ended(self) -> None:
        """Leaves the bar as it is."""
        self._progress.stop()


def default_reporter() -> Reporter:
    """Returns progress bars on a terminal, and plain lines elsewhere."""
    return ProgressBars() if sys.stderr.isatty() else PlainLines()


def summary(record: Mapping[str, Any]) -> str:
    """Says the main numbers of an epoch's record."""
    return (
        f"loss {record['loss']:.4f}  train {record['accuracy']:.2%}  validation {record['validation_accuracy']:.2%}  "
        f"{record['images_per_second']:.0f} images/s"
    )


class Several(Reporter):
    """Passes everything on to several reporters."""

    def __init__(self, *reporters: Reporter):
        self._reporters = reporters

    def started(self, outline: Outline) -> None:
        """Tells all."""
        for reporter in self._reporters:
            reporter.started(outline)

    def stepped(self, step: int, loss: float) -> None:
        """Tells all."""
        for reporter in self._reporters:
            reporter.stepped(step, loss)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Tells all."""
        for reporter in self._reporters:
            reporter.epoch_ended(record)

    def ended(self) -> None:
        """Tells all."""
        for reporter in self._reporters:
            reporter.ended()
