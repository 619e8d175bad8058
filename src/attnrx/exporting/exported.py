"""Runs exported files as modules, and finds the files in a folder that belong to exports."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.exporting.formats import PRECISIONS, Format, Run, dtype_name, raising, script_path
from attnrx.exporting.runtime_formats import FORMATS, Onnx
from attnrx.support import arguments as kinds
from attnrx.support.arguments import DEVICE, Invalid, below
from attnrx.support.atomic_writes import require_absent, require_replaceable, write_atomically
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported
from attnrx.support.foreign_files import untrusted
from attnrx.support.modules import joined
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import file_kind, file_sha256, read_json, read_record
from attnrx.vit.models.family import STATED_OUTPUTS

KIND, SCHEMA = "attnrx exported model", 1
SEAL = "# Written by attnrx; edited since, if this is not the hash of the lines above: {}\n"


def _require_file_names(files: Mapping[str, Any], where: str) -> None:
    """Checks that `files` maps file names (without folders) to hashes (as strings)."""
    for name, sha256 in files.items():
        if Path(name).name != name or not isinstance(sha256, str):
            raise Invalid(below(where, name), "is no file name with its sha256 as text")


def _require_sizes(outputs: Mapping[str, Any], where: str) -> None:
    """Checks that `outputs` maps names to integers, which are the sizes of the outputs per image."""
    for name, size in outputs.items():
        if type(size) is not int or size < 0:
            raise Invalid(below(where, name), "is no number of values per image")


FACTS = kinds.record(
    {
        "format": kinds.JSON_OBJECT,
        "images": kinds.record(
            {
                "shape": kinds.each(kinds.whole(1, 2**16), least=3, most=3),
                "precision": kinds.one_of(*PRECISIONS),
                "batch": kinds.optional(kinds.whole(1, 2**31 - 1)),
                "device": kinds.matching(r"cpu|cuda(:\d{1,4})?", "cpu, cuda or cuda:N"),
            },
            {"item": kinds.each(kinds.whole(1, 2**31 - 1))},
        ),
        "files": kinds.record(open=True, then=_require_file_names),
        "normalization": kinds.record(
            {"mean": kinds.each(kinds.finite(), least=1), "std": kinds.each(kinds.finite(), least=1)}
        ),
        "class_names": kinds.each(kinds.ANY_TEXT),
    },
    {"outputs": kinds.record(open=True, then=_require_sizes)},
    open=True,
)
RECORD = kinds.record(more={"earlier": FACTS}, then=FACTS.check, open=True)  # earlier: see `_of_present_files`


# The kinds of outputs that a file's facts must name, because the width of the outputs does not show their kind.
OF_FILES = ("multilabel", "label_probabilities", "regression", "embedding", "map", "several")


@dataclass(frozen=True)
class Images:
    """The input of an exported file: [batch, channels, height, width] at `precision`, on `device`.

    `batch` is None if the batch size is dynamic. If the model takes inputs with other axes, e.g. videos, volumes or
    time series, `item` is the shape of one input.
    """

    shape: tuple[int, int, int]
    precision: str = "float32"
    batch: int | None = None
    device: str = "cpu"
    item: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of one input of the file."""
        return self.item or self.shape

    def described(self) -> dict[str, Any]:
        """Returns the fields as JSON values, without `item` if the inputs are ordinary images."""
        values = to_dict(self, typed=False)
        return values if self.item else {name: value for name, value in values.items() if name != "item"}

    def as_items(self, images: Float[Tensor, "batch *sizes"]) -> Float[Tensor, "batch *items"]:
        """Returns images in the shape that the file takes."""
        return images.flatten(1).unflatten(1, self.item) if self.item else images


class Exported(nn.Module):
    """Runs a file that `export` wrote, with torch's current number of CPU threads. The module cannot be trained.

    If the file has a fixed batch size, other batches are split into chunks of this size, and the last chunk is padded
    with zeros. Images are moved to the file's device. `facts` is the content of PATH.json: normalization, classes,
    parity and more.
    """

    def __init__(self, path: Path, form: Format, images: Images, facts: Mapping[str, Any]):
        super().__init__()
        self.path, self.form, self.images, self.facts = Path(path), form, images, dict(facts)
        # The empty parameter tells the module's dtype and device. The hash in a buffer identifies the file.
        self.precision = nn.Parameter(torch.empty(0, dtype=images.dtype), requires_grad=False)
        # A bytearray is used, because torch warns about buffers that are read-only.
        digest = hashlib.sha256(self.path.read_bytes()).digest()
        self.register_buffer("content", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        self._runs: dict[int, Run] = {}
        # Class logits need no stated kind, because their width shows it. A file of patch features has no kind.
        if self.facts.get("output") in OF_FILES:
            setattr(self, STATED_OUTPUTS, self.facts["output"])

    def __repr__(self) -> str:
        batch = "any batch" if self.images.batch is None else f"batches of {self.images.batch}"
        return f"Exported({str(self.path)!r}, {self.form}, images {list(self.images.sizes)}, {batch})"

    @property
    def output_sizes(self) -> Mapping[str, int]:
        """The number of values per image in each output, by the output's name. Empty if there is only one output."""
        return self.facts.get("outputs", {})

    @property
    def bytes(self) -> int:
        """The size in bytes of the files that the runtime loads."""
        names = self.facts.get("files") or [path.name for path in self.form.files(self.path)]
        return sum(self.path.with_name(name).stat().st_size for name in names)

    def forward(self, images: Float[Tensor, "batch *sizes"]) -> Any:
        """Returns the outputs of the file, e.g. logits or the features of all patches, on the device of the images.

        The result is a tensor [batch, ...], or several tensors by name. The images have the shape
        [batch, channels, height, width] or the shape of the file's input.

        Raises:
            InvalidInput: The file does not accept images of this shape or precision.
            NotSupported: The file was exported for a device that this machine does not have.
        """
        fits = images.shape[1:] in (self.images.shape, self.images.sizes)
        if not fits or images.dtype != self.images.dtype or not len(images):
            raise InvalidInput(
                f"{self.path.name} takes [batch, {', '.join(map(str, self.images.sizes))}] at {self.images.precision}; "
                f"found {list(images.shape)} at {dtype_name(images.dtype)}."
            )
        run = self.opened(torch.get_num_threads())  # this comes first, because it checks the device
        placed = self.images.as_items(images.to(self.images.device))
        with torch.no_grad():
            found = run(placed) if self.images.batch is None else _chunked_forward(run, placed, self.images.batch)
        outputs = tuple(each.to(images.device) for each in found)
        if len(outputs) == 1:
            return outputs[0]
        return dict(zip(self.output_sizes, outputs, strict=True)) if self.output_sizes else outputs

    def opened(self, threads: int) -> Run:
        """Returns a function that runs the file on a number of CPU threads, without checks of its input.

        Raises:
            NotSupported: The file was exported for a device that this machine does not have.
            CheckpointError: The runtime cannot open the file.
        """
        # A session keeps the number of threads that it was started with, so every thread count has its own session.
        if threads not in self._runs:
            if not DEVICE.accepts(self.images.device):
                raise NotSupported(
                    f"{self.path} was exported for {self.images.device}, and torch finds no such device here; export "
                    "it again on the CPU."
                )
            problem = f"{self.path} cannot be opened as {self.form.name}"
            with raising(problem, "Export it again on this machine.", CheckpointError):
                self._runs[threads] = self.form.open(self.path, self.images.device, threads)
        return self._runs[threads]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exported":
        # The sessions of runtimes cannot be copied.
        return Exported(self.path, self.form, self.images, self.facts).train(self.training)


def _chunked_forward(run: Run, images: Tensor, size: int) -> tuple[Tensor, ...]:
    parts = []
    for part in images.split(size):
        # F.pad takes the axes from the last to the first. Only the batch is padded, and not the image's axes.
        missing = size - len(part)
        found = run(F.pad(part, (0, 0) * (part.ndim - 1) + (0, missing)) if missing else part)
        parts.append(tuple(each[: len(part)] for each in found))
    return joined(parts)


def result_path(folder: Path, form: Format) -> Path:
    """Returns the path of an exported file in a result folder: model.onnx, or model-FORMAT.SUFFIX for other formats."""
    return folder / f"{'model' if form.name == Onnx.name else f'model-{form.name}'}{form.suffix}"


def facts_path(path: Path | str) -> Path:
    """Returns the path of the JSON file with the facts about an exported file, which is PATH.json."""
    path = Path(path)
    return path.with_name(f"{path.name}.json")


def is_exported(path: Path | str) -> bool:
    """Returns whether there is an exported file at the path, i.e. a file with its facts beside it in PATH.json."""
    return Path(path).is_file() and facts_path(path).is_file()


def present_facts(path: Path) -> dict[str, Any] | None:
    """Returns the facts that were recorded about the exported file at `path`, or None if it is missing or changed."""
    if not is_exported(path):
        return None
    try:
        facts = _of_present_files(path, read_json(facts_path(path)))
        return facts if facts["kind"] == KIND and _changed_file(path, facts) is None else None
    # The facts are not validated here, so any of their fields may be missing or of another type.
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _of_present_files(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts that match the files on disk, which are the earlier facts if a replacement was interrupted."""
    # The new facts are valid once their files are in place. Until then, the old files and the earlier facts are valid.
    facts = dict(facts)
    earlier = facts.pop("earlier", None)
    if earlier is None or _changed_file(path, facts) is None or _changed_file(path, earlier) is not None:
        return facts
    return dict(earlier)


def _changed_file(path: Path, facts: Mapping[str, Any]) -> Path | None:
    """Returns the first file whose hash differs from the recorded one, or None."""
    for name, sha256 in facts["files"].items():
        file = path.with_name(name)
        if not file.is_file() or file_sha256(file) != sha256:
            return file
    return None


def load_exported(path: Path | str, trust: bool = False) -> Exported:
    """Opens a file that `export` wrote, as a module that runs it in its runtime.

    A .pt2 file (program or aotinductor) can run arbitrary code. Such a file is opened only if `trust` is True.
    Otherwise, InvalidInput is raised.

    Raises:
        CheckpointError: The file was changed or renamed after the export, or its facts name an unknown format.
    """
    path = Path(path)
    facts = _of_present_files(path, read_record(facts_path(path), KIND, SCHEMA, RECORD))
    try:
        form = from_dict(facts["format"], FORMATS.values())
    except AttnrxError as error:
        raise CheckpointError(f"{facts_path(path)}: format: {error}") from error
    # The hashes are checked before a runtime parses the file, because a damaged file could crash a runtime in C++.
    changed = _changed_file(path, facts) if path.name in facts["files"] else path
    if changed is not None:
        raise CheckpointError(
            f"{changed} is not the file that was exported (its name or its sha256 differs): the files are "
            f"{', '.join(sorted(facts['files']))}; name them so again, or export again."
        )
    # A matching hash does not make a file safe, because the file's author also writes the hash.
    if form.runs_code and not trust:
        raise untrusted(f"{path} is {form.name}: such a file", "; onnx and openvino need no trust")
    images = from_dict(facts["images"], Images)
    if not form.on_cuda and images.device != "cpu":
        raise CheckpointError(
            f"{facts_path(path)}: images.device is {images.device!r}, and files of {form.name} run on the CPU; it was "
            "edited. Export again."
        )
    return Exported(path, form, images, facts).eval()


def sealed_script(script: str) -> str:
    """Returns a script with an additional last line, a hash that shows whether the script was edited later."""
    return script + SEAL.format(hashlib.sha256(script.encode()).hexdigest()[:16])


def present_script(path: Path) -> Path | None:
    """Returns the script beside an exported file, or None if it is missing, was edited, or belongs to another file."""
    script = script_path(path)
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    body = text[: text.rfind(SEAL.partition("{")[0])]
    # Files with the same stem share the name of their scripts. A script belongs to the file that it opens.
    return script if text == sealed_script(body) and f'"{path.name}"' in body else None


def require_export_path(path: Path, form: Format, with_script: bool) -> None:
    """Raises InvalidInput if an export would overwrite files (e.g. PATH.json or a script) that attnrx did not write."""
    require_replaceable(path)
    require_absent([facts_path(path)], lambda file: file_kind(file) == KIND)
    script = script_path(path)
    if with_script and os.path.lexists(script) and present_script(path) is None:
        raise InvalidInput(
            f"the script that runs {path.name} goes into {script}, which exists and was edited or not written by an "
            "export: move it away, or choose another name."
        )
    files = form.files(path)
    if len(files) > 1:
        require_replaceable_files(path, files)


def require_replaceable_files(path: Path, files: Iterable[Path]) -> None:
    """Raises InvalidInput if one of `files` exists and does not belong to an earlier export at the path."""
    require_absent(list(files), stated_files(path).__contains__)


def stated_files(path: Path) -> list[Path]:
    """Returns the files that are listed in an export's facts and unchanged, even if the export was interrupted."""
    try:
        facts = read_json(facts_path(path))
        stated = facts["files"] if facts["kind"] == KIND else {}
        files = {path.with_name(name): sha256 for name, sha256 in stated.items()}
    # The facts are not validated here, so any of their fields may be missing or of another type.
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        return []
    return [file for file, sha256 in files.items() if file.is_file() and file_sha256(file) == sha256]


def present_exports(folder: Path) -> dict[Path, dict[str, Any]]:
    """Returns the facts about every export in a folder, by its main file. Exports with changed files are left out."""
    paths = (facts.with_name(facts.name.removesuffix(".json")) for facts in sorted(folder.glob("*.json")))
    return {path: facts for path in paths if (facts := present_facts(path)) is not None}


def files_of_export(path: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Returns an export's facts file, its other files and, if it was not edited, its script."""
    script = present_script(path)
    return [facts_path(path), *map(path.with_name, facts["files"]), *([] if script is None else [script])]


def copy_export(exported: Exported, path: Path) -> None:
    """Copies an export, with its facts and its script, to the folder of `path`. The files keep their names.

    The facts are copied last, because files without facts do not count as an export.
    """
    for each in reversed(files_of_export(exported.path, exported.facts)):
        write_atomically(path.with_name(each.name), partial(shutil.copyfile, each))


def remove_export(path: Path) -> None:
    """Deletes an export, even an interrupted one. Files and scripts that were changed after the export are kept."""
    # The main file is deleted first, because without it there is no export. The facts are deleted last, because they
    # list the files that still have to be deleted after an interruption.
    for each in sorted(stated_files(path), key=lambda file: file != path):
        each.unlink(missing_ok=True)
    if (script := present_script(path)) is not None:
        script.unlink(missing_ok=True)
    if file_kind(facts_path(path)) == KIND:
        facts_path(path).unlink(missing_ok=True)
