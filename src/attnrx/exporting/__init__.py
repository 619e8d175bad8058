"""Exports models to files that run without attnrx. Every file is compared with its model before it is saved.

rx.export(slim, "slim.onnx")                       # or "onnx(opset=18)", "program", "aotinductor" ...
rx.exporting.load_exported("slim.onnx")(images)              # logits, from ONNX Runtime
"""

from attnrx.exporting.baseline import (
    UNCHANGED,
    Baseline,
    Draft,
    PartDraft,
    few_images,
    library_subject,
    temporary_files,
    vendor_file,
    vendor_title,
    with_8_bits,
    without_8_bits,
    without_blocks,
    written_files,
)
from attnrx.exporting.exported import (
    Exported,
    Images,
    copy_export,
    is_exported,
    load_exported,
    present_exports,
    present_script,
    remove_export,
    require_export_path,
    require_replaceable_files,
    result_path,
)
from attnrx.exporting.formats import AOTInductor, Format, Program, dtype_name
from attnrx.exporting.runtime_formats import FORMATS, Int8, Onnx, OpenVINO, parse_format
from attnrx.exporting.writing import (
    DYNAMIC,
    ExportSubject,
    PatchFeatures,
    bare_subject,
    compare_with_original,
    export,
    fitting_names,
    precision_for,
    subject_of,
    write_exported,
)

__all__ = [
    "DYNAMIC", "FORMATS", "UNCHANGED", "AOTInductor", "Baseline", "Draft", "ExportSubject", "Exported",
    "Format", "Images", "Int8", "Onnx", "OpenVINO", "PartDraft", "PatchFeatures", "Program", "bare_subject",
    "compare_with_original", "copy_export", "dtype_name", "export", "few_images", "fitting_names", "is_exported",
    "library_subject", "load_exported", "parse_format", "precision_for", "present_exports", "present_script",
    "remove_export", "require_export_path", "require_replaceable_files", "result_path", "subject_of",
    "temporary_files", "vendor_file", "vendor_title", "with_8_bits", "without_8_bits", "without_blocks",
    "write_exported", "written_files",
]  # fmt: skip
