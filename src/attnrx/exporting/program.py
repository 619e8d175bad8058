"""A torch.export program, run by PyTorch without attnrx."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from attnrx.exporting.format import ROUNDING, Format, Run
from attnrx.shapes import Tensor


@dataclass(frozen=True)
class Program(Format):
    """A program captured by torch.export, with its weights; loading it needs PyTorch only."""

    name: ClassVar[str] = "program"
    suffix: ClassVar[str] = ".pt2"
    writes_out: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ROUNDING)
    on_cuda: ClassVar[bool] = True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        torch.export.save(program, path)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the program; it uses torch's threads."""
        return torch.export.load(path).module()
