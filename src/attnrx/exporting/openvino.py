"""OpenVINO IR, run by OpenVINO on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from attnrx.exporting.format import Format, Run, to_numpy
from attnrx.optional import required_module
from attnrx.shapes import Tensor

EXTRA = "openvino"


@dataclass(frozen=True)
class OpenVINO(Format):
    """An .xml file with the graph and a .bin file with the weights, translated from the program.

    It runs in float32, also on CPUs that support narrower types.
    """

    name: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program and saves it with float32 weights."""
        openvino = required_module("openvino", EXTRA, "this format")
        openvino.save_model(openvino.convert_model(program), str(path), compress_to_fp16=False)

    def open(self, path: Path, device: str, threads: int) -> Run:
        openvino = required_module("openvino", EXTRA, "this format")
        hints = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(str(path), "CPU", hints)

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(compiled(to_numpy(images))[0].copy())

        return run
