"""The baseline for all speeds: what you would run without attnrx.

By default, the baseline is your model in eager PyTorch. If you name a file format, the baseline is a file that the
vendor's own tools create from your model, for the same runtime and precision.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.data import ImageSet
from attnrx.exporting.exported import Exported, Images, result_path
from attnrx.exporting.formats import INPUT, AOTInductor, Format, dtype_name, library, raising, to_numpy
from attnrx.exporting.quantizing import quantized, silent
from attnrx.exporting.runtime_formats import BATCH, Int8, Onnx, OpenVINO, converted_by_openvino
from attnrx.exporting.writing import (
    CAPTURED,
    ExportSubject,
    bare_subject,
    captured,
    free_lengths,
    subject_of,
    write_exported,
)
from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import AttnrxError
from attnrx.support.modules import copy_module
from attnrx.support.optional import is_installed
from attnrx.support.progress import Log
from attnrx.support.shapes import Tensor
from attnrx.support.subprocess_runner import run_side_by_side
from attnrx.vit.models import blocks_of, family_of, timed_form

UNCHANGED, EMPTY = "nothing removed", "no blocks"
# How many images calibrate an 8-bit file that is only timed. A few suffice, because its time does not depend on ranges.
TIMED_ON = 8
FREE_BATCH: Any = ({0: torch.export.Dim(BATCH)},)


@dataclass(frozen=True, eq=False)
class Baseline:
    """The model or file that you would run without attnrx. `faster=` and all reported speeds are relative to it.

    Attributes:
        title: The baseline's name in logs, claims and reports.
        model: The module or the exported file that is timed.
        form: The format of the file, or None for eager PyTorch.
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
        """Returns a baseline that runs the model in its own library's code. An attnrx model runs in attnrx's code."""
        name = getattr(family_of(model), "library", None)
        if name is None:
            return cls("the unchanged model in the same kernels", model)
        return cls(
            f"the original in {'its own code' if name == 'module' else name}", family_of(model).library_model(model)
        )

    @classmethod
    def as_file(
        cls, model: nn.Module, form: Format, images: ImageSet, log: Log, in_subprocess: bool = False
    ) -> "Baseline":
        """Returns a baseline with the vendor's file of a model, in a format's runtime and precision.

        attnrx also writes two files of its own: the unchanged model, and the model without its blocks. 8-bit files are
        calibrated on only a few of the images, because they are only timed. If the vendor's tool fails, attnrx's file
        of the unchanged model is the baseline instead. With `in_subprocess`, some files are written in another process
        at the same time.

        Raises:
            NotSupported: attnrx cannot write the model in the format.
        """
        vendor = vendor_title(form)
        images = few_images(images)
        by_vendor = Draft(library_subject(model, form, images), form, by_vendor=True)
        drafts = {vendor: by_vendor, **_own_drafts(model, form, images)}
        files = temporary_files(drafts, in_subprocess)
        unchanged, empty = _own_files(files)
        title, file = vendor, files[vendor]
        if not isinstance(file, Exported):
            log(f"speeds are relative to attnrx's file of your model: {file}")
            title, file = UNCHANGED, unchanged
        return cls(title, file, form, unchanged, empty)

    @property
    def files(self) -> dict[str, Exported]:
        """The vendor's file and attnrx's file of the unchanged model, by their titles."""
        files = {UNCHANGED: self.unchanged, self.title: self.model}
        return {title: file for title, file in files.items() if isinstance(file, Exported)}

    def of_copy(self, model: nn.Module, images: ImageSet, in_subprocess: bool = False) -> "Baseline":
        """Returns this baseline for plans that prune a changed copy of the original, with attnrx's files of it."""
        assert self.form is not None  # plans for a copy are timed as files
        drafts = _own_drafts(model, self.form, few_images(images))
        unchanged, empty = _own_files(temporary_files(drafts, in_subprocess))
        return replace(self, unchanged=unchanged, empty=empty)


def few_images(images: ImageSet) -> ImageSet:
    """Returns at most TIMED_ON of the images, to calibrate a file that is only timed."""
    return images.take(min(TIMED_ON, len(images)))


@dataclass(frozen=True, eq=False)
class Draft:
    """A file to write: the model, the format, and whether the vendor's tool or attnrx writes it.

    With `is_compared`, the outputs of a file that attnrx writes must match the model's, or `write` raises an error.
    """

    subject: ExportSubject
    form: Format
    by_vendor: bool = False
    is_compared: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module,
        form: Format,
        images: ImageSet,
        class_names: Sequence[str] = (),
        *,
        is_compared: bool = False,
    ) -> "Draft":
        """Returns the draft of a file that attnrx writes. An 8-bit file is calibrated on the images."""
        return cls(subject_of(model, form, images, class_names), form, is_compared=is_compared)

    def write(self, path: Path) -> Exported:
        """Writes the file.

        Raises:
            NotSupported: The model cannot be written, or the outputs of the file differ from the model's.
        """
        if self.by_vendor:
            return vendor_file(self.subject, path, self.form)
        return write_exported(self.subject, path, self.form, is_compared=self.is_compared)


@dataclass(frozen=True, eq=False)
class PartDraft:
    """A part of a model to write, e.g. some blocks, for inputs like the `example` [batch, tokens, width].

    The second axis of the inputs may have any size. The part must be on the device of the example, and in its dtype.
    """

    part: nn.Module
    example: Tensor
    form: Format
    by_vendor: ClassVar[bool] = False

    def write(self, path: Path) -> Exported:
        """Writes the file. Only `Exported.opened` can run it.

        Raises:
            NotSupported: The part cannot be written.
        """
        with raising(f"a part of this model cannot be timed as {self.form.name}"):
            # With AUTO, the size becomes fixed if a block needs all tokens, e.g. for pairwise biases. A named size
            # would raise an error.
            program = captured(self.part, self.example, ({1: torch.export.Dim.AUTO},))
            self.form.write(program, path, [self.example])
        precision, device = dtype_name(self.example.dtype), str(self.example.device)
        return Exported(path, self.form, Images((1, 1, 1), precision, None, device, (*self.example.shape[1:],)), {})


def written_files(drafts: Mapping[str, Draft | PartDraft], in_subprocess: bool = False) -> dict[str, Exported]:
    """Writes files to temporary folders, as `temporary_files` does.

    Raises:
        NotSupported: A file cannot be written.
    """
    files = dict[str, Exported]()
    for name, file in temporary_files(drafts, in_subprocess).items():
        if not isinstance(file, Exported):
            raise file
        files[name] = file
    return files


def temporary_files(drafts: Mapping[str, Draft | PartDraft], in_subprocess: bool) -> dict[str, Exported | AttnrxError]:
    """Writes files to temporary folders. If a file cannot be written, the error is returned in its place.

    A folder is deleted once its file is no longer in use. With `in_subprocess`, another process writes some of the
    files at the same time, because writing a file uses only one core.
    """
    # The longest calls come first, so that both processes end at about the same time. For the vendor's 8-bit file, NNCF
    # runs the images one by one, and for attnrx's 8-bit files in batches.
    drafts = dict(sorted(drafts.items(), key=lambda item: (not item[1].form.calibrated, not item[1].by_vendor)))
    with ExitStack() as opened:
        folders = {name: opened.enter_context(ExitStack()) for name in drafts}
        calls = list[Callable[[], Exported | AttnrxError]]()
        for name, draft in drafts.items():
            path = result_path(folders[name].enter_context(scratch_folder()), draft.form)
            calls.append(partial(_attempt, draft, path))
        made = run_side_by_side(calls, in_subprocess)
        if in_subprocess:  # a file may fail only in the other process, e.g. without a reader that you registered
            made = [file if isinstance(file, Exported) else call() for file, call in zip(made, calls, strict=True)]
        files = dict(zip(drafts, made, strict=True))
        for name, file in files.items():
            if isinstance(file, Exported):
                weakref.finalize(file, folders[name].pop_all().close)
    return files


def _attempt(draft: Draft | PartDraft, path: Path) -> Exported | AttnrxError:
    try:
        return draft.write(path)
    except AttnrxError as error:
        return error


def _own_drafts(model: nn.Module, form: Format, images: ImageSet) -> dict[str, Draft]:
    """Returns the drafts of the two files that attnrx writes: the model, and the model without its blocks."""
    return {UNCHANGED: Draft.of(model, form, images), EMPTY: Draft.of(without_blocks(model), form, images)}


def _own_files(files: Mapping[str, Exported | AttnrxError]) -> tuple[Exported, Exported | None]:
    unchanged, empty = files[UNCHANGED], files[EMPTY]
    if not isinstance(unchanged, Exported):
        raise unchanged
    return unchanged, empty if isinstance(empty, Exported) else None


def without_blocks(model: nn.Module) -> nn.Module:
    """Returns a copy of a model in which every block returns its input tokens."""
    empty = copy_module(model)
    for block in blocks_of(empty, family_of(empty)):
        block.forward = lambda tokens, *_, **__: tokens
    return empty


def with_8_bits(form: Format) -> Format | None:
    """Returns the 8-bit format for the same runtime, or None if there is none or a library is missing."""
    if isinstance(form, Onnx):
        found = form if isinstance(form, Int8) else Int8(form.opset)
    elif isinstance(form, OpenVINO):
        found = replace(form, precision="int8")
    else:
        return None
    return found if all(map(is_installed, found.libraries)) else None


def without_8_bits(form: Format) -> Format:
    """Returns the float format for the same runtime.

    For 8-bit OpenVINO, this format is bfloat16, because operations that are not quantized already run in bfloat16.
    """
    if isinstance(form, Int8):
        return Onnx(form.opset)
    return replace(form, precision="bf16") if isinstance(form, OpenVINO) and form.calibrated else form


def library_subject(model: nn.Module, form: Format, images: ImageSet) -> ExportSubject:
    """Returns an `ExportSubject` for a model that runs its original library's code, at the format's precision."""
    # `Baseline.eager` times a different object: `family.library_model`, whose weights may differ from this model's.
    return bare_subject(timed_form(model, in_kernels=False), subject_of(model, form, images))


def vendor_title(form: Format) -> str:
    """Returns a title for the file that the vendor's own tool writes, for logs, claims and reports."""
    if isinstance(form, OpenVINO):
        precision = {"f32": "float32", "bf16": "bfloat16", "int8": "int8"}[form.precision]
        return f"OpenVINO's own conversion to {precision}"
    if isinstance(form, Onnx):
        is_int8 = isinstance(form, Int8)
        return "ONNX Runtime's own conversion to int8" if is_int8 else "torch.onnx's own conversion to float32"
    return f"{'AOTInductor' if isinstance(form, AOTInductor) else 'torch.export'} of your model"


def vendor_file(subject: ExportSubject, path: Path, form: Format) -> Exported:
    """Writes a model to a file for any batch size with the vendor's own tool, as you would without attnrx.

    `subject` is the model in its own library's code. 8-bit files are calibrated on the subject's images.

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
    with free_lengths(model):
        converted = converted_by_openvino(model, example_input=example)
    converted.reshape([-1, *example.shape[1:]])
    if images:
        # By NNCF's defaults, the range of an activation is the mean over single images.
        single = (to_numpy(image) for batch in images for image in batch.split(1))
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
    """Returns an object with the interface of ONNX Runtime's CalibrationDataReader."""
    inputs = ({INPUT: batch} for batch in batches)
    return SimpleNamespace(get_next=lambda: next(inputs, None))
