"""What the vendor's own tools make of a model: the conversion of a runtime, and its 8 bits by the defaults."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from attnrx.exporting.exported import Exported
from attnrx.exporting.formats import INPUT, Format, library, raising, to_numpy
from attnrx.exporting.quantizing import quantized, silent, single_images
from attnrx.exporting.runtime_formats import BATCH, Int8, Onnx, OpenVINO
from attnrx.exporting.writing import CAPTURED, ExportSubject
from attnrx.support.optional import is_installed
from attnrx.support.shapes import Tensor


def with_8_bits(form: Format) -> Format | None:
    """Returns the format of 8 bits in the runtime of a format; None if it has none, or a library is missing."""
    if isinstance(form, Onnx):
        found = form if isinstance(form, Int8) else Int8(form.opset)
    elif isinstance(form, OpenVINO):
        found = replace(form, precision="int8")
    else:
        return None
    return found if all(map(is_installed, found.libraries)) else None


def without_8_bits(form: Format) -> Format:
    """Returns the float format in the runtime of a format; for OpenVINO with 8 bits that in bfloat16, because the rest
    of such a file is in bfloat16, too.
    """
    if isinstance(form, Int8):
        return Onnx(form.opset)
    return replace(form, precision="bf16") if isinstance(form, OpenVINO) and form.calibrated else form


def with_vendor(form: Format) -> bool:
    """Whether the runtime of a format has a conversion of its vendor's own."""
    return isinstance(form, Onnx | OpenVINO)


def vendor_title(form: Format) -> str:
    """Returns how the vendor's file in a format is made, in a few words."""
    if isinstance(form, OpenVINO):
        precision = {"f32": "float32", "bf16": "bfloat16", "int8": "int8 by NNCF's defaults"}[form.precision]
        return f"OpenVINO's own conversion, {precision}"
    precision = "int8 by ONNX Runtime's static quantization" if isinstance(form, Int8) else "float32"
    return f"torch.onnx's own conversion, {precision}"


def vendor_file(subject: ExportSubject, path: Path, form: Format) -> Exported:
    """Writes the vendor's file of a model, as a user would without attnrx, for any number of images.

    `subject` is the model in its own code; files with 8 bits are calibrated on its images.

    Raises:
        NotSupported: The tool cannot convert the model.
    """
    example = torch.zeros(CAPTURED, *subject.images.shape, dtype=subject.images.dtype)
    with raising(f"{vendor_title(form)} fails"), silent(), torch.no_grad():
        if isinstance(form, OpenVINO):
            _write_openvino(subject.model, path, example, subject.batches(form.wanted) if form.calibrated else ())
        else:
            _write_onnx(subject.model, path, example, subject.batches(form.wanted) if form.calibrated else ())
    return Exported(path, form, subject.images, {}).eval()


def _write_openvino(model: nn.Module, path: Path, example: Tensor, images: Sequence[Tensor]) -> None:
    openvino = library("openvino", "openvino")
    converted = openvino.convert_model(model, example_input=example)
    converted.reshape([-1, *example.shape[1:]])
    if images:
        single = single_images(map(to_numpy, images), is_free=True)
        converted = quantized(converted, single, by_defaults=True)
    openvino.save_model(converted, str(path), compress_to_fp16=False)


def _write_onnx(model: nn.Module, path: Path, example: Tensor, images: Sequence[Tensor]) -> None:
    shapes: Any = ({0: torch.export.Dim(BATCH)},)
    program: Any = torch.onnx.export(
        model, (example,), dynamo=True, dynamic_shapes=shapes, input_names=[INPUT], verbose=False
    )
    program.save(str(path))
    if images:
        plain = path.rename(path.with_name(f"float_{path.name}"))
        quantization = library("onnxruntime.quantization")
        quantization.quantize_static(str(plain), str(path), _reader(map(to_numpy, images)))


def _reader(batches: Iterable[Any]) -> Any:
    """Returns the interface of ONNX Runtime's CalibrationDataReader."""
    inputs = ({INPUT: batch} for batch in batches)
    return SimpleNamespace(get_next=lambda: next(inputs, None))
