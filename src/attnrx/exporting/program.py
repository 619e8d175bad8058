"""A program of torch.export, run by PyTorch without the code that made it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from attnrx.exporting.format import ROUNDING, Format, Run
from attnrx.shapes import Tensor


@dataclass(frozen=True)
class Program(Format):
    """What torch.export captured, with its weights: loads in a process that has PyTorch alone."""

    name: ClassVar[str] = "program"
    suffix: ClassVar[str] = ".pt2"
    writes_out: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ROUNDING)
    on_cuda: ClassVar[bool] = True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Saves the program."""
        torch.export.save(program, path)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the program; its threads are those of torch."""
        return torch.export.load(path).module()
