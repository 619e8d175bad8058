"""Exporting: files that run without attnrx, each checked against the model before it is left on disk.

    attnrx.exporting.export(slim, "slim.onnx")                       # or "onnx(opset=18)", "program", "aotinductor" ...
    attnrx.exporting.load_exported("slim.onnx")(images)              # logits, from ONNX Runtime

The formats are interchangeable parts, one file each.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from attnrx.data import ImageData
from attnrx.exporting import exported as _exported
from attnrx.exporting.aot import AOTInductor
from attnrx.exporting.exported import Exported, Images, is_exported
from attnrx.exporting.format import Format
from attnrx.exporting.onnx import Onnx
from attnrx.exporting.openvino import OpenVINO
from attnrx.exporting.parity import Parity
from attnrx.exporting.program import Program
from attnrx.exporting.quantized import Int8
from attnrx.exporting.text import parse_format_text
from attnrx.exporting.writing import DYNAMIC, Subject, bare_subject, captured, write_exported
from attnrx.model_data import images_for

FORMATS: Mapping[str, type[Format]] = {form.name: form for form in (Onnx, Program, AOTInductor, OpenVINO, Int8)}

__all__ = [
    "DYNAMIC",
    "FORMATS",
    "AOTInductor",
    "Exported",
    "Format",
    "Images",
    "Int8",
    "Onnx",
    "OpenVINO",
    "Parity",
    "Program",
    "Subject",
    "bare_subject",
    "captured",
    "export",
    "is_exported",
    "load_exported",
    "parse_format",
    "write_exported",
]


def parse_format(text: str) -> Format:
    """Reads a format with its knobs, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128,method=percentile)`."""
    return parse_format_text(text, FORMATS)


def load_exported(path: Path | str, trust: bool = False) -> Exported:
    """Opens a file that `export` wrote, as a model: its answers come from what runs the file.

    An AOTInductor package is native code: it is refused unless `trust` is True.
    """
    return _exported.load_exported(path, FORMATS, trust)


def export(
    model: nn.Module,
    path: Path | str,
    to: Format | str = "onnx",
    *,
    batch: int | str = DYNAMIC,
    precision: str | None = None,
    calibration: ImageData | None = None,
) -> Exported:
    """Writes a model as a file that runs without attnrx, and returns that file as a model.

    `to` is a format or its text: onnx, program (torch.export), aotinductor, openvino or int8. The file takes batches of
    any size, or of `batch` images; it is written at `precision`, the model's own by default. It is run beside the
    model on the calibration images, which int8 needs, or on noise; where a logit differs by more than rounding (or
    than int8 was allowed) nothing is left on disk. Beside it lies PATH.json: the model's fingerprint, what images the
    file takes and how they are normalized, class names where they are known, versions, and the parity that was found.

    Raises:
        NotSupported: The model cannot be written so, or answers otherwise; the message says which and what to do.
        InvalidInput: A suffix, batch or precision that cannot be.
    """
    form = parse_format(to) if isinstance(to, str) else to
    images = None if calibration is None else images_for(model, calibration, "calibration")
    return write_exported(Subject.of(model, form, batch, precision, images), path, form)
