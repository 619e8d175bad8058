"""Exporting: files that run without attnrx; each is compared with the model before it is saved.

    attnrx.exporting.export(slim, "slim.onnx")                       # or "onnx(opset=18)", "program", "aotinductor" ...
    attnrx.exporting.load_exported("slim.onnx")(images)              # logits, from ONNX Runtime

Every format is a class in its own module.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from attnrx.data import ImageData
from attnrx.exporting import exported as _exported
from attnrx.exporting.exported import Exported, Images, is_exported
from attnrx.exporting.format import Format, parse_format_text
from attnrx.exporting.onnx import Onnx
from attnrx.exporting.openvino import OpenVINO
from attnrx.exporting.parity import Parity
from attnrx.exporting.program import AOTInductor, Program
from attnrx.exporting.quantized import Int8
from attnrx.exporting.writing import DYNAMIC, ExportSubject, bare_subject, captured, write_exported
from attnrx.model_data import images_for

FORMATS: Mapping[str, type[Format]] = {form.name: form for form in (Onnx, Program, AOTInductor, OpenVINO, Int8)}

__all__ = [
    "DYNAMIC",
    "FORMATS",
    "AOTInductor",
    "ExportSubject",
    "Exported",
    "Format",
    "Images",
    "Int8",
    "Onnx",
    "OpenVINO",
    "Parity",
    "Program",
    "bare_subject",
    "captured",
    "export",
    "is_exported",
    "load_exported",
    "parse_format",
    "write_exported",
]


def parse_format(text: str) -> Format:
    """Parses a format with its knobs, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128,method=percentile)`."""
    return parse_format_text(text, FORMATS)


def load_exported(path: Path | str, trust: bool = False) -> Exported:
    """Opens a file written by `export` as a module that runs it with its runtime.

    An AOTInductor package is native code and raises InvalidInput unless `trust` is True.
    """
    return _exported.open_exported(path, FORMATS, trust)


def export(
    model: nn.Module,
    path: Path | str,
    to: Format | str = "onnx",
    *,
    batch: int | str = DYNAMIC,
    precision: str | None = None,
    calibration: ImageData | None = None,
) -> Exported:
    """Writes a model as a file that runs without attnrx, and returns the file as a module.

    `to` is a format or its text: onnx, program (torch.export), aotinductor, openvino or int8. The file accepts batches
    of any size, or of `batch` images; `precision` defaults to the model's own. Its logits are compared with the model's
    on the calibration images (required for int8) or on noise; if a logit differs by more than rounding (for int8: than
    `most_difference`), no file is written. PATH.json contains the fingerprint of the model, the shape and normalization
    of images, class names if known, versions, and the measured parity.

    Raises:
        NotSupported: The model cannot be written in this format, or the logits differ.
        InvalidInput: The suffix, the batch or the precision is invalid.
    """
    form = parse_format(to) if isinstance(to, str) else to
    images = None if calibration is None else images_for(model, calibration, "calibration")
    return write_exported(ExportSubject.of(model, form, batch, precision, images), path, form)
