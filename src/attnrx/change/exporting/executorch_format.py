"""ExecuTorch files, for phones and other devices without Python; on a CPU by XNNPACK."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram

from attnrx.change.exporting.format import Format, Run, library
from attnrx.support.shapes import Tensor


@dataclass(frozen=True)
class ExecuTorch(Format):
    """A .pte file: the program lowered to XNNPACK, the rest in ExecuTorch's own kernels.

    The memory of such a file is planned when it is written, so it takes a fixed number of images: one, unless `batch`
    is given to the export.
    """

    name: ClassVar[str] = "executorch"
    libraries: ClassVar[tuple[str, ...]] = ("executorch",)
    extra: ClassVar[str] = "executorch"
    runtime: ClassVar[str] = "ExecuTorch"
    suffix: ClassVar[str] = ".pte"
    fixed_batch: ClassVar[int | None] = 1

    def write(self, program: ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
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
