"""Writes the history of a run to TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnrx.optional import required_module
from attnrx.training.reporters import Outline, Reporter


class TensorBoard(Reporter):
    """Writes every number of every epoch as a curve to `folder/tensorboard`; resuming replaces repeated epochs."""

    def __init__(self, folder: Path | str):
        self._folder = Path(folder) / "tensorboard"
        self._writer: Any = None

    def started(self, outline: Outline) -> None:
        writer = required_module("torch.utils.tensorboard.writer", "tensorboard", "a TensorBoard log")
        self._writer = writer.SummaryWriter(str(self._folder), purge_step=outline.step + 1 if outline.step else None)

    def stepped(self, step: int, loss: float) -> None:
        """Does nothing; the history is by epoch."""

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
