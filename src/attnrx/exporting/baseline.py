"""What you would run without attnrx: the baseline of every speed.

This is your model in eager PyTorch, or the file that the vendor's own tools make of it in the runtime and precision
that you name.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from attnrx.data import ImageSet
from attnrx.exporting.exported import Exported
from attnrx.exporting.formats import INPUT, AOTInductor, Format, library, raising, to_numpy
from attnrx.exporting.quantizing import quantized, silent, single_images
from attnrx.exporting.runtime_formats import BATCH, Int8, Onnx, OpenVINO
from attnrx.exporting.writing import CAPTURED, ExportSubject, bare_subject, subject_of, write_exported
from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import AttnrxError, NotSupported
from attnrx.support.modules import copy_module
from attnrx.support.optional import is_installed
from attnrx.support.progress import Log
from attnrx.support.shapes import Tensor
from attnrx.vit.models import blocks_of, family_of, timed_form

UNCHANGED = "nothing removed"
FREE_BATCH: Any = ({0: torch.export.Dim(BATCH)},)


@dataclass(frozen=True, eq=False)
class Baseline:
    """What you would run without attnrx. `faster=` and all speeds of evidence and reports are relative to it.

    Attributes:
        title: Its name in logs, claims and reports.
        model: What is timed: a module, or a file.
        form: The format of the file; None for eager PyTorch.
        unchanged: attnrx's file of the model with nothing removed, if it was written.
        empty: attnrx's file of the model without its blocks, if it was written.
    """

    title: str
    model: nn.Module
    form: Format | None = None
    unchanged: Exported | None = None
    empty: Exported | None = None

    @classmethod
    def eager(cls, model: nn.Module) -> "Baseline":
        """Returns a model in the code of its own library; attnrx's own models have only attnrx's code."""
        name = getattr(family_of(model), "library", None)
        if name is None:
            return cls("the unchanged model in the same kernels", model)
        return cls(
            f"the original in {'its own code' if name == 'module' else name}", family_of(model).library_model(model)
        )

    @classmethod
    def as_file(cls, model: nn.Module, form: Format, images: ImageSet, log: Log) -> "Baseline":
        """Returns the vendor's file of a model in the runtime and precision of a format, beside attnrx's files.

        If the format has 8 bits, all are quantized on these images. If the vendor's tool fails, attnrx's file takes its
        place.

        Raises:
            NotSupported: attnrx cannot write the model in the format.
        """
        opened = ExitStack()
        folder = opened.enter_context(scratch_folder())
        unchanged, empty = _own_files(model, form, images, folder)
        title, file = UNCHANGED, unchanged
        try:
            subject, path = library_subject(model, form, images), folder / f"vendor{form.suffix}"
            title, file = vendor_title(form), vendor_file(subject, path, form)
        except AttnrxError as error:
            log(f"speeds are relative to attnrx's file of your model: {error}")
        made = cls(title, file, form, unchanged, empty)
        weakref.finalize(made, opened.close)  # the files are read while they are timed
        return made

    def of_copy(self, model: nn.Module, images: ImageSet) -> "Baseline":
        """Returns this baseline with attnrx's files of a changed copy of the model, to plan for the copy.

        Its files exist as long as it is in use.
        """
        if self.form is None:
            return self
        opened = ExitStack()
        unchanged, empty = _own_files(model, self.form, images, opened.enter_context(scratch_folder()))
        made = replace(self, unchanged=unchanged, empty=empty)
        weakref.finalize(made, opened.close)
        return made


def _own_files(model: nn.Module, form: Format, images: ImageSet, folder: Path) -> tuple[Exported, Exported | None]:
    """Writes attnrx's files of a model, and of the model without its blocks if it can be written, into a folder."""

    def written(name: str, module: nn.Module) -> Exported:
        subject = subject_of(module, form, images)
        return write_exported(subject, folder / f"{name}{form.suffix}", form, is_compared=False)

    unchanged = written("unchanged", model)
    with suppress(NotSupported):
        return unchanged, written("empty", without_blocks(model))
    return unchanged, None


def without_blocks(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose blocks return their tokens."""
    empty = copy_module(model)
    for block in blocks_of(empty, family_of(empty)):
        block.forward = lambda tokens, *_, **__: tokens
    return empty


def with_8_bits(form: Format) -> Format | None:
    """Returns the 8-bit format in the runtime of a format; None if it has none, or a library is missing."""
    if isinstance(form, Onnx):
        found = form if isinstance(form, Int8) else Int8(form.opset)
    elif isinstance(form, OpenVINO):
        found = replace(form, precision="int8")
    else:
        return None
    return found if all(map(is_installed, found.libraries)) else None


def without_8_bits(form: Format) -> Format:
    """Returns the float format in the runtime of a format.

    For OpenVINO with 8 bits it is bfloat16, because the rest of such a file is in bfloat16, too.
    """
    if isinstance(form, Int8):
        return Onnx(form.opset)
    return replace(form, precision="bf16") if isinstance(form, OpenVINO) and form.calibrated else form


def library_subject(model: nn.Module, form: Format, images: ImageSet) -> ExportSubject:
    """Returns a model in the code of its own library as the subject of a file, at the precision of the format."""
    # This is not the library's model that latencies in PyTorch are relative to, which has other weights.
    return bare_subject(timed_form(model, in_kernels=False), subject_of(model, form, images))


def vendor_title(form: Format) -> str:
    """Returns how the vendor's file in a format is made, in a few words."""
    if isinstance(form, OpenVINO):
        precision = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}[form.precision]
        return f"OpenVINO's own conversion to {precision}"
    if isinstance(form, Onnx):
        is_int8 = isinstance(form, Int8)
        return "ONNX Runtime's own conversion to int8" if is_int8 else "torch.onnx's own conversion to float32"
    return f"{'AOTInductor' if isinstance(form, AOTInductor) else 'torch.export'} of your model"


def vendor_file(subject: ExportSubject, path: Path, form: Format) -> Exported:
    """Writes the vendor's file of a model, as a user would without attnrx, for any number of images.

    `subject` is the model in its own code; files with 8 bits are calibrated on its images.

    Raises:
        NotSupported: The tool cannot convert the model.
    """
    example, model = subject.example(CAPTURED), subject.of_items
    images = [*map(subject.images.as_items, subject.batches(form.wanted))] if form.calibrated else []
    with raising(f"{vendor_title(form)} fails"), silent(), torch.no_grad():
        if isinstance(form, OpenVINO):
            _write_openvino(model, path, example.cpu(), images)
        elif isinstance(form, Onnx):
            _write_onnx(model, path, example.cpu(), images)
        else:
            form.write(torch.export.export(model, (example,), dynamic_shapes=FREE_BATCH), path, ())
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
    program: Any = torch.onnx.export(
        model, (example,), dynamo=True, dynamic_shapes=FREE_BATCH, input_names=[INPUT], verbose=False
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
