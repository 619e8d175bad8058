"""Formats as text: `onnx`, `onnx(opset=18)`, `int8(images=128,method=percentile)`.

format  = name [ "(" knob "=" value { "," knob "=" value } ")" ]
value   = "true" | "false" | "none" | number | word
"""

from collections.abc import Mapping

from attnrx.errors import InvalidInput, UnknownName
from attnrx.exporting.format import Format
from attnrx.serialization.text_parsing import KnobReader, Language, knobs_of

LANGUAGE = Language("format", "Formats", "onnx, onnx(opset=18) or int8(images=128)", "(),=", InvalidInput)


def parse_format_text(text: str, registry: Mapping[str, type[Format]]) -> Format:
    """Parses one format; `registry` maps their names to classes."""
    reader = _Reader(text)
    name = reader.expect("name", "the name of a format")
    if name.text not in registry:
        raise UnknownName("format", name.text, registry)
    knobs = reader.read_knobs(name, knobs_of(registry[name.text]))
    reader.expect("end", "the end")
    return registry[name.text](**knobs)


class _Reader(KnobReader):
    language = LANGUAGE
