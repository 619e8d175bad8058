"""Int8 by post-training static quantisation, calibrated on images, run by ONNX Runtime."""

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

# The last operator of an activation function: its own, or the product that ends decomposed GELU, SiLU and gates.
ACTIVATIONS = ("Gelu", "Mul", "Relu")
METHODS: dict[str, str] = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


@dataclass(frozen=True)
class Int8(Onnx):
    """ONNX with 8-bit linear maps, by ONNX Runtime's static quantisation (QDQ).

    Weights are quantised per output feature, activations per tensor with ranges estimated by `method` on `images`
    calibration images. The outputs of activation functions have outliers that a per-tensor 8-bit range does not cover:
    linear maps after them are quantised only with `after_activation`, and the two products inside attention only with
    `attention`. Patch embedding, norms, softmax and activation functions are never quantised. `most_difference` is the
    largest allowed difference of a logit from eager PyTorch, as a share of the largest logit; use `verify` to measure
    the loss of accuracy.
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
        """Writes the float ONNX file, calibrates it on the images, and quantises it."""
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
                    nodes_to_exclude=self._excluded_nodes(onnx.load(plain, load_external_data=False)),
                    per_channel=True,
                    activation_type=quantization.QuantType.QUInt8,
                    weight_type=quantization.QuantType.QInt8,
                    calibrate_method=getattr(quantization.CalibrationMethod, METHODS[self.method]),
                )
        finally:
            for each in path.parent.glob(f"{plain.name}*"):
                each.unlink()

    def _excluded_nodes(self, model: Any) -> list[str]:
        """Returns the names of the matrix products that are not quantised."""
        weights = {tensor.name for tensor in model.graph.initializer}
        producers = {output: node.op_type for node in model.graph.node for output in node.output}
        found = []
        for node in model.graph.node:
            if node.op_type not in ("Gemm", "MatMul"):
                continue
            has_no_weight = not weights & set(node.input)
            follows_activation = producers.get(node.input[0]) in ACTIVATIONS
            skips_activation = follows_activation and not has_no_weight and not self.after_activation
            if (has_no_weight and not self.attention) or skips_activation:
                found.append(node.name)
        return found

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Starts an ONNX Runtime session on the CPU."""
        return session(path, threads)

    @property
    def wanted(self) -> int:
        """The number of calibration images."""
        return self.images

    def limit(self, dtype: torch.dtype) -> float:
        """Returns `most_difference`, because quantisation errors exceed rounding."""
        return self.most_difference


class _Reader:
    """ONNX Runtime's CalibrationDataReader interface: returns one batch per call, then None."""

    def __init__(self, images: Sequence[Tensor]):
        self.batches = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: to_numpy(batch)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables the warnings of the quantiser."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
