"""The export formats by name, and their text form."""

from collections.abc import Mapping

from attnrx.change.exporting.format import Format
from attnrx.change.exporting.onnx_formats import Int8, Onnx
from attnrx.change.exporting.openvino_format import OpenVINO
from attnrx.change.exporting.torch_formats import AOTInductor, Program
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.text_parsing import KnobReader, Language, knobs_of

FORMATS: Mapping[str, type[Format]] = {form.name: form for form in (Onnx, Program, AOTInductor, OpenVINO, Int8)}


class _FormatReader(KnobReader):
    language = Language("format", "Formats", "onnx, onnx(opset=18) or int8(images=128)", "(),=", InvalidInput)


def parse_format(text: str) -> Format:
    """Parses a format with its knobs, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128,method=percentile)`."""
    reader = _FormatReader(text)
    name = reader.expect("name", "the name of a format")
    if name.text not in FORMATS:
        raise UnknownName("format", name.text, FORMATS)
    knobs = reader.read_knobs(name, knobs_of(FORMATS[name.text]))
    reader.expect("end", "the end")
    return FORMATS[name.text](**knobs)
