"""Formats of PyTorch: programs of torch.export and AOTInductor packages."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.change.exporting.format import ROUNDING, Format, Run
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Tensor


def _returning_all(run: Callable[[Tensor], Any]) -> Run:
    def run_all(images: Tensor) -> tuple[Tensor, ...]:
        outputs = run(images)
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    return run_all


@dataclass(frozen=True)
class Program(Format):
    """A program captured by torch.export, with its weights; loading it needs PyTorch only.

    torch unpickles parts of the file when it opens it, e.g. weights and constants, and a pickle can run any code.
    """

    name: ClassVar[str] = "program"
    runtime: ClassVar[str] = "torch.export"
    suffix: ClassVar[str] = ".pt2"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ROUNDING)
    on_cuda: ClassVar[bool] = True
    runs_code: ClassVar[bool] = True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        torch.export.save(program, path)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the program; it uses torch's threads."""
        # Without guards: `Exported` validates shapes, and that of a free size excludes the size of the model, at which
        # its library skips the interpolation.
        return _returning_all(torch.export.load(path).module(check_guards=False))


@dataclass(frozen=True)
class AOTInductor(Program):
    """An AOTInductor package: compiled for this kind of machine, loads in seconds, and also runs from C++.

    Export needs a C++ compiler; the runtime needs the same version of PyTorch.
    """

    name: ClassVar[str] = "aotinductor"
    runtime: ClassVar[str] = "AOTInductor"

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Compiles the program, with its weights, into a package of AOTInductor.

        Raises:
            NotSupported: There is no C++ compiler.
        """
        from torch._inductor import aoti_compile_and_package, config

        # The candidates of torch's compiler; None among them represents a compiler that conda would download.
        compilers = [name for name in config.cpp.cxx if name]
        if not any(shutil.which(name) for name in compilers):
            raise NotSupported(f"aotinductor compiles C++, and there is no compiler ({', '.join(compilers)}): get g++.")
        aoti_compile_and_package(program, package_path=str(path))

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the package; it uses torch's threads."""
        from torch._inductor import aoti_load_package

        return _returning_all(aoti_load_package(str(path)))
