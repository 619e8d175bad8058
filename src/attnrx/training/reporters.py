"""Progress reporters of a training run."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrx.support.optional import required_module


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
    """Callbacks for the events of a run, called in the first process only; each does nothing unless overridden."""

    def started(self, outline: Outline) -> None:
        """Called before the first step."""

    def stepped(self, step: int, loss: float) -> None:
        """Called after steps; `loss` is the mean of the epoch so far."""

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        """Called after every epoch; `record` is its line of the history."""

    def ended(self) -> None:
        """Called at the end of the run, finished or not."""


class Silent(Reporter):
    """A reporter without output."""


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
            # Without the steps of an earlier run, which took none of this time.
            rate = (step - self._outline.step) / (time.monotonic() - self._began)
            left = (self._outline.steps - step) / rate / 60
            self._say(
                f"step {step}/{self._outline.steps}  loss {loss:.4f}  {rate:.2f} steps/s  about {left:.0f} min left"
            )

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        self._say(_epoch_line(record, self._outline))

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

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        description = TextColumn("{task.description}")
        # On stderr, because stdout is for results.
        self._progress = Progress(description, *columns, console=Console(stderr=True), refresh_per_second=4)
        self._outline = Outline(0, 0, 0)
        # The number of steps is known only when the run starts.
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
        self._progress.console.print(_epoch_line(record, self._outline), highlight=False)

    def ended(self) -> None:
        self._progress.stop()


def default_reporter() -> Reporter:
    return ProgressBars() if sys.stderr.isatty() else PlainLines()


def _epoch_line(record: Mapping[str, Any], outline: Outline) -> str:
    shares = (("train", record["accuracy"]), ("validation", record["validation_accuracy"]))
    measured = "".join(f"{name} {share:.2%}  " for name, share in shares if share is not None)
    return (
        f"epoch {record['epoch']}/{outline.epochs}  loss {record['loss']:.4f}  {measured}"
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


class TensorBoard(Reporter):
    """Writes every number of every epoch as a curve to `folder/tensorboard`; resuming replaces repeated epochs."""

    def __init__(self, folder: Path | str):
        self._folder = Path(folder) / "tensorboard"
        self._writer: Any = None

    def started(self, outline: Outline) -> None:
        writer = required_module("torch.utils.tensorboard.writer", "tensorboard", "a TensorBoard log")
        # purge_step hides the points of epochs that will be repeated
        self._writer = writer.SummaryWriter(str(self._folder), purge_step=outline.step + 1 if outline.step else None)

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        for name, value in curves(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def ended(self) -> None:
        if self._writer is not None:
            self._writer.close()


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns every number of an epoch's record under a path such as `layer 0/effective_rank/head 2`."""
    numbers: dict[str, float] = {
        f"training/{name}": float(value) for name, value in record.items() if isinstance(value, int | float)
    }
    numbers |= {f"losses/{name}": value for name, value in record["losses"].items()}
    for layer, readings in enumerate(record["layers"]):
        for name, heads in readings.items():
            numbers |= {f"layer {layer}/{name}/head {head}": value for head, value in enumerate(heads)}
    return numbers
