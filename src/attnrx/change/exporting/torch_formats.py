"""Formats of PyTorch: programs of torch.export, AOTInductor packages, and ExecuTorch files."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.change.exporting.format import ROUNDING, Format, Run, library
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
        # Without guards: `Exported` validates shapes.
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


@dataclass(frozen=True)
class ExecuTorch(Format):
    """A .pte file, for devices without Python: the program lowered to XNNPACK, the rest in ExecuTorch's own kernels.

    The memory of such a file is planned when it is written, so it takes a fixed number of images: one, unless `batch`
    is given to the export.
    """

    name: ClassVar[str] = "executorch"
    libraries: ClassVar[tuple[str, ...]] = ("executorch",)
    extra: ClassVar[str] = "executorch"
    runtime: ClassVar[str] = "ExecuTorch"
    suffix: ClassVar[str] = ".pte"
    fixed_batch: ClassVar[int | None] = 1

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Lowers the program to XNNPACK and plans its memory."""
        exir = library("executorch.exir", self.extra)
        partitioner = library("executorch.backends.xnnpack.partition.xnnpack_partitioner", self.extra)
        lowered = exir.to_edge_transform_and_lower(
            program.run_decompositions(_DECOMPOSITIONS), partitioner=[partitioner.XnnpackPartitioner()]
        )
        path.write_bytes(lowered.to_executorch().buffer)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the file; the threads are those of all files of the process."""
        pool: Any = library("executorch.extension.pybindings.portable_lib", self.extra)
        if pool._threadpool_get_thread_count() != threads:
            pool._unsafe_reset_threadpool(threads)
        program = library("executorch.runtime", self.extra).Runtime.get().load_program(path)
        method = program.load_method("forward")

        def run(images: Tensor) -> tuple[Tensor, ...]:
            return tuple(method.execute([images.detach().contiguous()]))

        return run


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # Not PyTorch's own decomposition, which masks rows without keys by six operations that XNNPACK does not have.
    del dropout_p, is_causal, enable_gqa  # of models that are trained or that generate
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    return torch.softmax(scores if attn_mask is None else scores + attn_mask, -1) @ value


def _sorted(
    values: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    # ExecuTorch has no sort; the largest of all is one.
    return torch.topk(values, values.shape[dim], dim, descending, True)


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _plain_attention,
    torch.ops.aten.sort.stable: _sorted,
}
