"""ONNX, run by ONNX Runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.errors import InvalidInput
from attnrx.exporting.format import Format, Run, to_numpy
from attnrx.optional import required_module
from attnrx.shapes import Tensor

INPUT, OUTPUT, EXTRA = "images", "logits", "onnx"
OPSETS = range(18, 24)
# Protocol buffers are limited to two gigabytes; larger weights are stored in an external file.
MOST_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Onnx(Format):
    """An ONNX file with input "images" and output "logits"; weights above MOST_BYTES are in an external file.

    Attention is exported unfused at exact ranks: ONNX Runtime's matrix products accept any width, so padding would only
    add operations. `opset` is the operator set version, 18 to 23; it includes GELU from 20 on.
    """

    name: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    opset: int = 20

    def __post_init__(self):
        if self.opset not in OPSETS:
            raise InvalidInput(f"{self.name}(opset={self.opset}): give {OPSETS.start} to {OPSETS.stop - 1}.")

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program; the exporter folds constants."""
        for package in ("onnx", "onnxscript"):
            required_module(package, EXTRA, "this format")
        translated: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=self.opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            custom_translation_table=_translations(),
            verbose=False,
        )
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        translated.save(str(path), external_data=size > MOST_BYTES)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Starts an ONNX Runtime session on the CPU."""
        return session(path, threads)


def _translations() -> dict[Any, Any]:
    """Returns the translation of the stable sort of token reducers, which torch's exporter lacks.

    TopK of all elements is a stable sort: of two equal values it returns the one with the lower index first.
    """
    op = required_module("onnxscript", EXTRA, "this format").opset18

    def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)

    return {torch.ops.aten.sort.stable: sort_stable}


def session(path: Path, threads: int) -> Run:
    """Opens an ONNX file in ONNX Runtime with this many threads, without spinning."""
    runtime = required_module("onnxruntime", EXTRA, "this format")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    opened = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        (logits,) = opened.run([OUTPUT], {INPUT: to_numpy(images)})
        return torch.from_numpy(logits)

    return run
