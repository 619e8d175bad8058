"""Int8 by quantisation after training, calibrated on images, run by ONNX Runtime."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.errors import InvalidInput
from attnrx.exporting.format import Run, to_numpy
from attnrx.exporting.onnx import EXTRA, INPUT, Onnx, session
from attnrx.optional import required_module
from attnrx.shapes import Tensor

# What ends an activation function: its own operator, or the product that GELU, SiLU and gates are written out to.
ACTIVATIONS = ("Gelu", "Mul", "Relu")
METHODS: dict[str, str] = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


@dataclass(frozen=True)
class Int8(Onnx):
    """ONNX whose linear maps compute in 8 bits, as ONNX Runtime's static quantisation writes them (QDQ).

    Weights are quantised per output feature, activations per tensor in ranges that `images` calibration images show,
    read off by `method`. What an activation function gives has outliers that 8 bits for a tensor do not cover: the maps
    that read it stay as they are unless `after_activation` is true, and the two products inside attention unless
    `attention` is. The patch embedding, norms, softmax and activation functions always do. `most_difference` is the
    largest difference of a logit from eager's that is accepted, as a share of the largest logit: what 8 bits cost in
    accuracy is for `verify` to say.
    """

    name: ClassVar[str] = "int8"
    calibrated: ClassVar[bool] = True
    images: int = 64
    method: str = "minmax"
    attention: bool = False
    after_activation: bool = False
    most_difference: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.images < 1 or self.method not in METHODS or not self.most_difference > 0:
            raise InvalidInput(
                f"int8(images={self.images}, method={self.method}, most_difference={self.most_difference}): give an "
                f"image or more, one of {', '.join(METHODS)}, and a difference above 0."
            )

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the ONNX, watches it on the images, and quantises it."""
        quantization, onnx = (
            required_module("onnxruntime.quantization", EXTRA, "this format"),
            required_module("onnx", EXTRA, "this format"),
        )
        plain = path.with_name(f"float_{path.name}")
        try:
            super().write(program, plain, images)
            with _quiet():
                quantization.quantize_static(
                    plain,
                    path,
                    _Reader(images),
                    quant_format=quantization.QuantFormat.QDQ,
                    op_types_to_quantize=["Gemm", "MatMul"],
                    nodes_to_exclude=self._left_out(onnx.load(plain, load_external_data=False)),
                    per_channel=True,
                    activation_type=quantization.QuantType.QUInt8,
                    weight_type=quantization.QuantType.QInt8,
                    calibrate_method=getattr(quantization.CalibrationMethod, METHODS[self.method]),
                )
        finally:
            for each in path.parent.glob(f"{plain.name}*"):
                each.unlink()

    def _left_out(self, model: Any) -> list[str]:
        """Names the matrix products that stay as they are."""
        stored = {tensor.name for tensor in model.graph.initializer}
        makers = {output: node.op_type for node in model.graph.node for output in node.output}
        found = []
        for node in model.graph.node:
            if node.op_type not in ("Gemm", "MatMul"):
                continue
            of_two = not stored & set(node.input)
            after = makers.get(node.input[0]) in ACTIVATIONS
            if (of_two and not self.attention) or (after and not of_two and not self.after_activation):
                found.append(node.name)
        return found

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Starts a session on the CPU."""
        return session(path, threads)

    @property
    def wanted(self) -> int:
        """The requested number."""
        return self.images

    def limit(self, dtype: torch.dtype) -> float:
        """What was requested for: this is no rounding."""
        return self.most_difference


class _Reader:
    """The calibration images, one batch after the other, as ONNX Runtime asks for them."""

    def __init__(self, images: Sequence[Tensor]):
        self.left = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.left, None)
        return None if batch is None else {INPUT: to_numpy(batch)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without advice to people who call the quantiser by hand."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
