"""OpenVINO files, in float32, bfloat16 or with 8-bit linear maps."""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from attnrx.change.exporting.format import ROUNDING, Format, Run, library, run_script, to_numpy
from attnrx.change.exporting.onnx_formats import Int8
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor

# The statements of the script beside the file: the facts are in the JSON file of the export.
OPENING = """about = json.loads(here.with_name("{file}.json").read_text(encoding="utf-8"))
batch = about["images"]["batch"] or 1
hints = {{"INFERENCE_PRECISION_HINT": "{precision}"}}
compiled = openvino.Core().compile_model(str(here.with_name("{file}")), "CPU", hints)"""


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _signal_stack_kept() -> Iterator[None]:
    """Restores the memory in which this thread handles signals.

    A compiled model of OpenVINO brings its own, and at its end restores what it found. Of two models, the one that ends
    last then restores memory of the other, which is gone: the next signal ends the process, e.g. when a child process
    ends after a loader with workers was used.
    """
    stack, exchange = (
        _SignalStack(),
        getattr(ctypes.CDLL(None), "sigaltstack", None) if sys.platform == "linux" else None,
    )
    if exchange is not None:
        exchange(None, ctypes.byref(stack))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(stack), None)


def fold_norms_(model: Any) -> None:
    """Moves the scale g and the offset b of every layer norm into the linear maps W that follow it, where nothing else
    does: W (g x + b) = (W g) x + W b, with g as a factor of the columns. OpenVINO does not, and computes g x + b for
    all tokens in an operation of its own.
    """
    op = library("openvino.opset13", "openvino")
    for norm in [node for node in model.get_ordered_ops() if node.get_type_name() == "MVN"]:
        scaled = _only_user(norm, "Multiply")
        shifted = None if scaled is None else _only_user(scaled, "Add")
        if scaled is None or shifted is None:
            continue
        gains, offsets, maps = _constant_of(scaled), _constant_of(shifted), _users(shifted)
        if gains is None or offsets is None or not gains.size == offsets.size == gains.shape[-1]:
            continue
        # [outputs, inputs] or its transpose.
        found = [_constant_of(each) if each.get_type_name() == "MatMul" else None for each in maps]
        weights = [weight for weight in found if weight is not None and weight.ndim == 2]
        if len(weights) < len(maps):
            continue
        for each, weight in zip(maps, weights, strict=True):
            columns = weight if each.get_attributes()["transpose_b"] else weight.T
            product = op.matmul(norm, op.constant(columns * gains.reshape(-1)), False, True)
            constant, added = columns @ offsets.reshape(-1), _only_user(each, "Add")
            bias = None if added is None else _constant_of(added)
            if bias is not None and bias.size == bias.shape[-1]:
                constant = constant + bias.reshape(-1)
            else:
                added = None
            result = op.add(product, op.constant(constant))
            for use in (added or each).output(0).get_target_inputs():
                use.replace_source_output(result.output(0))
    model.validate_nodes_and_infer_types()


def divide_attention_(model: Any) -> None:
    """Replaces scaled dot-product attention by its products and softmax, which OpenVINO runs as one kernel either way:
    of the fused operation it transposes the keys in memory (docs/results/speed.md).
    """
    op = library("openvino.opset13", "openvino")
    for node in [each for each in model.get_ordered_ops() if each.get_type_name() == "ScaledDotProductAttention"]:
        query, key, value, *others = node.input_values()
        # A mask, which may be one number, and the scale: programs of torch state both.
        if len(others) != 2 or node.get_attributes()["causal"]:
            continue
        mask, scale = others
        factor = _number_of(scale.get_node())
        scaled = query if factor == 1.0 else op.multiply(query, scale)
        products = op.matmul(scaled, key, False, True)
        if _number_of(mask.get_node()) != 0.0:
            products = op.add(products, mask)
        attended = op.matmul(op.softmax(products, -1), value, False, False)
        for use in node.output(0).get_target_inputs():
            use.replace_source_output(attended.output(0))
    model.validate_nodes_and_infer_types()


def _number_of(node: Any) -> float | None:
    """Returns the value of a constant of one number, or None."""
    is_number = node.get_type_name() == "Constant" and node.get_data().size == 1
    return float(node.get_data().item()) if is_number else None


def _users(node: Any) -> list[Any]:
    return [use.get_node() for use in node.output(0).get_target_inputs()]


def _only_user(node: Any, type_name: str) -> Any:
    """Returns the operation that alone takes the output of a node, if it is of this type, or None."""
    users = _users(node)
    return users[0] if len(users) == 1 and users[0].get_type_name() == type_name else None


def _constant_of(node: Any) -> "np.ndarray | None":
    """Returns the second operand of an operation in float32, or None where it is no constant."""
    source = node.input_value(1).get_node()
    if source.get_type_name() != "Constant" or source.get_element_type().to_string() != "f32":
        return None
    return np.array(source.get_data())


@dataclass(frozen=True)
class OpenVINO(Format):
    """An .xml file with the graph and a .bin file with the weights, translated from the program.

    It runs in float32, also on CPUs that support narrower types; or, with the `precision` bf16, in bfloat16 on CPUs
    that compute in it and in float32 on others (the weights are stored in float32). With int8 the linear maps are those
    of the format `int8` with `images` and `tolerance`.
    """

    name: ClassVar[str] = "openvino"
    libraries: ClassVar[tuple[str, ...]] = ("openvino",)
    extra: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"
    runtime: ClassVar[str] = "OpenVINO"
    precision: str = "f32"
    images: int = 64
    tolerance: float = 0.1

    def __post_init__(self):
        if self.precision not in ("f32", "bf16", "int8"):
            raise InvalidInput(f"openvino(precision={self.precision}): choose from f32, bf16, int8.")
        self._int8()  # raises for invalid knobs

    def files(self, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")

    def _int8(self) -> Int8:
        return Int8(images=self.images, tolerance=self.tolerance)

    @property
    def equal_heads(self) -> bool:
        return self.precision == "bf16"  # products in tiles (docs/results/speed.md)

    @property
    def calibrated(self) -> bool:
        return self.precision == "int8"

    @property
    def wanted(self) -> int:
        """The number of images for parity and, for int8, calibration."""
        return self.images if self.calibrated else super().wanted

    def runtime_at(self, precision: str) -> str:
        """Returns the name of the runtime with the precision of this format, which is not that of the file's input."""
        return super().runtime_at({"bf16": "bfloat16", "int8": "int8"}.get(self.precision, precision))

    def limit(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference at this precision."""
        limits = {"f32": super().limit(dtype), "bf16": ROUNDING[torch.bfloat16], "int8": self._int8().limit(dtype)}
        return limits[self.precision]

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program; for int8 the quantised ONNX file of it."""
        openvino = library("openvino", "openvino")
        if self.calibrated:
            onnx = path.with_suffix(".onnx")
            try:
                self._int8().write(program, onnx, images)
                model = openvino.convert_model(onnx)
            finally:
                onnx.unlink(missing_ok=True)
        else:
            model = openvino.convert_model(program)
            fold_norms_(model)
            divide_attention_(model)
        # By default the weights would be stored in float16.
        openvino.save_model(model, str(path), compress_to_fp16=False)

    def example(self, path: Path) -> str | None:
        return run_script(path, "openvino", OPENING.format(file=path.name, precision=self._hint), "compiled(images)[0]")

    @property
    def _hint(self) -> str:
        # f32 has to be requested: on CPUs with bfloat16 OpenVINO computes in it by default.
        return "bf16" if self.precision == "bf16" else "f32"

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Compiles the file for every shape that occurs: up to a third faster than for any number of images."""
        hints = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self._hint,
            "PERFORMANCE_HINT": "LATENCY",
        }
        core, compiled = library("openvino", "openvino").Core(), {}
        model = core.read_model(str(path))

        def run(images: Tensor) -> tuple[Tensor, ...]:
            if images.shape not in compiled:
                model.reshape(list(images.shape))
                with _signal_stack_kept():
                    compiled[images.shape] = core.compile_model(model, "CPU", hints)
            found = compiled[images.shape](to_numpy(images))
            # Copies, which the next call cannot overwrite.
            return tuple(torch.from_numpy(found[index].copy()) for index in range(len(model.outputs)))

        return run
