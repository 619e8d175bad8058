"""The export formats by name, and their text form."""

from collections.abc import Mapping

from attnrx.change.exporting.executorch_format import ExecuTorch
from attnrx.change.exporting.format import Format
from attnrx.change.exporting.onnx_formats import Int8, Onnx
from attnrx.change.exporting.openvino_format import OpenVINO
from attnrx.change.exporting.torch_formats import AOTInductor, Program
from attnrx.support.text_parsing import Language, TextReader

FORMATS: Mapping[str, type[Format]] = {
    form.name: form for form in (Onnx, Program, AOTInductor, OpenVINO, ExecuTorch, Int8)
}


class _FormatReader(TextReader):
    language = Language("format", "Formats", "onnx, onnx(opset=18) or int8(images=128)", "(),=")


def parse_format(text: str) -> Format:
    """Parses a format with its knobs, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128,method=percentile)`.

    Raises:
        UnknownName: There is no such format or knob.
        InvalidInput: The text has another form.
    """
    reader = _FormatReader(text)
    name, kind = reader.read_name(FORMATS, "format")
    form = reader.build(name, kind, reader.read_knobs(name, kind))
    reader.expect("end", "the end")
    return form
