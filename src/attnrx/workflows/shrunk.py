"""`Shrunk`, the result of `shrink`, and the files of its folder.

Saving replaces the files of an earlier result, but never files that attnrx did not write.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from attnrx import exporting
from attnrx.data import ImageParts, ImageSet
from attnrx.data.fixed_images import ONE_DRAW
from attnrx.data.model_data import num_classes
from attnrx.decide.planning.measured_costs import final_protocol
from attnrx.exporting import Format, Onnx, parse_format, result_path
from attnrx.exporting.exported import KIND as EXPORTED
from attnrx.exporting.exported import files_of_export, present_exports, present_script
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import KIND as EVIDENCE
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.plan import Plan
from attnrx.nouns.prescription import Prescription
from attnrx.nouns.target import DIVERGENCE, RECALL, Target
from attnrx.show.checks import Accuracy, Check, Fidelity, Index, Latency
from attnrx.show.reports import (
    MapSamples,
    ReportContent,
    evidence_stem,
    first_images,
    sample_maps,
    sample_tokens,
    summary_of,
    write_report,
)
from attnrx.support.arguments import checked
from attnrx.support.atomic_writes import ReplacedFiles, require_absent
from attnrx.support.display import Sentence
from attnrx.support.errors import AttnrxError, InvalidInput
from attnrx.support.shapes import ImageBatch
from attnrx.support.storage import REPORT, file_kind
from attnrx.vit.costs import Conditions
from attnrx.vit.models import (
    at_size_of,
    family_of,
    is_model_file,
    library_form,
    model_fingerprint,
    reduction_of,
    require_model_folder,
)
from attnrx.vit.models.boundary.acceleration import accelerate
from attnrx.vit.models.boundary.working_copy import is_working
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.outputs import Embeddings, Map, output_kind_of
from attnrx.workflows.load import preflight
from attnrx.workflows.save import require_no_sizes, save_with
from attnrx.workflows.verify import verify

REPORT_IMAGES, REPORT_MAPS = 8, 4  # how many test images the report shows, and for how many it shows maps


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller model with its prescription, its plan, and the evidence of what it cost.

    Unpack a result as `model, prescription, evidence`.

    Attributes:
        model: The smaller model.
        prescription: What was pruned, and how. None for the unchanged model.
        evidence: The comparison with the original.
        plan: The plan with its predictions. None for the unchanged model.
        target: The target that you passed to `shrink`.
        diagnosis: The diagnosis of the original, for the report.
        samples: A few normalized test images [images, channels, height, width] with their classes, for the report.
        class_names: The classes of the data, for exported files.
        images: The images that the model was planned and verified on.
        maps: The maps that the original and the smaller model return for some samples, for the report. None if their
            outputs are not maps.
        timed_in_kernels: Whether latency was measured in attnrx's kernels. If latency was also the target, the model is
            accelerated.
        form: The format of the file to write, as text, or None without `to`. It equals `to`, unless a file of the
            unchanged model replaces the plan's file. In this case, it is the format of the unchanged model's file.
        file: The temporary file in the format `form` on which the evidence was measured. `save` copies this file.
    """

    model: nn.Module
    prescription: Prescription | None
    evidence: Evidence
    plan: Plan | None
    target: Target
    diagnosis: Diagnosis | None = None
    samples: tuple[ImageBatch, tuple[str, ...]] | None = None
    class_names: tuple[str, ...] = ()
    images: ImageParts | None = None
    maps: MapSamples | None = None
    timed_in_kernels: bool = False
    form: str | None = None
    file: exporting.Exported | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.prescription, self.evidence))

    @property
    def is_portable(self) -> bool:
        """Whether the model's own library can create, load and save it."""
        return bool(self.evidence.about.get("portable"))

    def in_library_form(self) -> "Shrunk":
        """Returns the result with its model in the library's own class.

        If the target is a latency that was measured in attnrx's kernels, the model is also accelerated.
        """
        model = library_form(self.model)
        in_kernels = self.target.minimized == "latency" and self.timed_in_kernels
        is_kernel = in_kernels and is_working(self.model) and record_of(model) is not None
        return replace(self, model=accelerate(model) if is_kernel else model)

    @property
    def summary(self) -> Sentence:
        """The result in one sentence: the speed with its factors, the accuracy and the costs.

        The sentence also says if the images were drawn at random. `shrunk.summary()` returns the same text.
        """
        draws = [note for note in self.images.notes if ONE_DRAW in note] if self.images is not None else []
        return Sentence("; ".join((summary_of(self.evidence), *draws)))

    def __repr__(self) -> str:
        return f"Shrunk({self.summary})"

    @checked()
    def save(
        self,
        folder: Path | str,
        onnx: bool | None = None,
        *,
        to: str | None = None,
        opset: int = Onnx.opset,
        original: nn.Module | None = None,
        batch: int = 32,
        threads: int | None = None,
    ) -> Path:
        """Writes a folder with the model, its prescription, evidence, card and report, and a file to deploy.

        Everything is written to a new folder, which replaces the old one in one step. Files of an earlier result are
        replaced, and exports of other models are removed. Files that attnrx did not write are kept.

        The file to deploy is model.onnx. After `shrink(to=...)` it is a file in that format instead, e.g.
        model-int8.onnx. The evidence of `shrink` then reports the speed, the accuracy and the divergence of this file.
        The file is calibrated on the images that the plan was made on, and verified on other images.

        If you pass another format as `to`, its file gets its own evidence, e.g. evidence-int8.json, which compares it
        with the original. The file's speed is relative to the original in its own library, at the file's precision. The
        original is also timed as a file of the same format. This timing shows how much of the speed is due to the
        format, and how much to the compression.

        Args:
            folder: The folder to write. A missing folder is created.
            onnx: Whether to write model.onnx. By default, it is written if there is no file of another format.
            to: The format to write, e.g. "int8" or "openvino(precision=bf16)" (see `export`). By default, the `form`
                of this result.
            opset: The operator set version of model.onnx, 17 to 23. Choose a smaller one if your runtime or tool does
                not support the newest.
            original: The model that you passed to `shrink`. If you pass it, model.onnx is timed against the original's
                own ONNX file, for `reports.files_table`. You must pass it if `to` is not the format of this result.
            batch: Images per batch when the file for `to` is timed.
            threads: CPU threads during the timing (by default torch's number).

        Returns:
            The folder.

        Raises:
            InvalidInput: A file that attnrx did not write would be overwritten. In this case, nothing is changed.
            AttnrxError: The model cannot be exported. Everything else is saved.
        """
        folder = Path(folder)
        to = self.form if to is None else to
        onnx = to is None if onnx is None else onnx
        files = result_files(folder, Onnx(opset) if onnx else None, to)
        preflight(folder=folder, formats=files.values(), report=True)
        require_result_folder(folder, self.model, files)
        original = None if original is None else at_size_of(original, self.model)
        if to is not None and original is None and not self.has_evidence_of(to):
            raise InvalidInput(f"to={to!r} needs the original, which the evidence of the file is against; give it.")
        failures: list[AttnrxError] = []

        def write_others(new: Path) -> None:
            write_report(new / "report.html", self.report(f"attnrx: {folder.name}"))
            try:
                for path, form in files.items():
                    self._write_exported(new / path.name, form, to, original, batch, threads)
            except AttnrxError as error:  # the rest is saved, because it may be the result of hours of work
                failures.append(error)

        documents = self.prescription, self.evidence
        parts = result_parts(model_fingerprint(self.model))
        save_with(self.model, folder, *documents, write_others, parts, self.is_portable)
        if failures:
            raise failures[0]
        return folder

    def _write_exported(
        self, path: Path, form: Format, to: str | None, original: nn.Module | None, batch: int, threads: int | None
    ) -> None:
        """Writes model.onnx, or a model file in another format together with its evidence.

        The folder must not contain such a model file yet. If `original` is not None, model.onnx is also timed against
        the original's ONNX file.
        """
        is_of_format, images = to is not None and form == parse_format(to), self.images
        # `save_with` has checked that the evidence, and therefore the file, belongs to this model.
        if self.file is not None and self.file.form == form and self.file.facts["parity"]:
            exporting.copy_export(self.file, path)
            return
        calibration = images.planned if is_of_format and images is not None else None
        settings = {"precision": exporting.precision_for(self.model, form), "calibration": calibration}
        names = exporting.fitting_names(self.model, self.class_names)
        file = exporting.export(self.model, path, to=form, class_names=names, **settings)
        if to is not None and is_of_format and self.has_evidence_of(to):
            return
        if not is_of_format:
            if original is not None and self.prescription is not None:
                timed = int(self.evidence.about.get("batch", 32))
                exporting.compare_with_original(file, original, threads=threads, batches=(timed,))
            return
        assert original is not None and images is not None  # `save` required the original, `shrink` returned images
        conditions = Conditions(file.images.device, file.images.precision, threads)
        protocol = final_protocol(conditions, batch, original)
        speed = 1 / self.target.limit if self.target.quantity == "latency" else None
        tested, latency = images.verified, Latency(batch, protocol, speed, library=True)
        about = {"target": str(self.target), "file": path.name, "format": to}
        try:
            checks = with_accuracy(tested, original, *checks_of(self.target, original, tested), latency)
            evidence = verify(file, original, tested, checks, about, batch_size=32)
        except AttnrxError:
            exporting.remove_export(path)  # a file without evidence must not remain
            raise
        evidence.save(evidence_of(path))

    def has_evidence_of(self, to: str) -> bool:
        """Returns whether the evidence was measured on the file of this format."""
        about = self.evidence.about.get("format")
        return isinstance(about, str) and parse_format(about) == parse_format(to)

    def report(self, title: str) -> ReportContent:
        """Returns the content of the report, with the tokens of the sample images if tokens are pruned or merged."""
        tokens = None
        if self.samples is not None and reduction_of(self.model) is not None:
            with suppress(InvalidInput):  # patches that do not form a grid cannot be drawn
                tokens = sample_tokens(self.model, *self.samples)
        return ReportContent(
            title,
            self.evidence.about,
            self.prescription,
            self.diagnosis,
            self.evidence,
            tokens=tokens,
            outputs=self.maps,
        )


def samples_of(
    original: nn.Module, model: nn.Module, images: ImageSet, class_names: tuple[str, ...]
) -> tuple[tuple[ImageBatch, tuple[str, ...]] | None, MapSamples | None]:
    """Returns a few images with their classes for the report, and both models' output maps of the first images.

    If the models' inputs are not pictures, both results are None. If the models do not return maps, only the maps are
    None.
    """
    if not getattr(family_of(original).inputs(original), "is_plain", True):
        return None, None
    samples = first_images(images, class_names, REPORT_IMAGES)
    if samples is None or not isinstance(output_kind_of(original), Map):
        return samples, None
    shown, labels = samples[0][:REPORT_MAPS], samples[1][:REPORT_MAPS]
    return samples, sample_maps({"original": original, "this model": model}, shown, labels)


def checks_of(target: Target, model: nn.Module, images: ImageSet) -> tuple[Check, ...]:
    """Returns the checks that compare outputs. For embeddings, they include a search in the original's index.

    A divergence or recall target sets the limit of its check.
    """
    fidelity = Fidelity(most_divergence=target.limit if target.quantity == DIVERGENCE else None)
    is_searched = isinstance(output_kind_of(model), Embeddings) and len(images) >= Index.least
    if not is_searched:
        return (fidelity,)
    return fidelity, Index(least_recall=100 * target.limit if target.quantity == RECALL else None)


def with_accuracy(images: ImageSet, model: nn.Module, *checks: Check) -> tuple[Check, ...]:
    """Puts an accuracy check before the checks if the images have labels and the model makes decisions (classes)."""
    has_accuracy = images.has_labels and output_kind_of(model).has_decisions
    return (Accuracy(None), *checks) if has_accuracy else checks  # reported, without a limit


RESULT = re.compile(r"model(-\w+)?")  # the stems of exported files in a result folder


def result_files(folder: Path, onnx: Onnx | None, to: str | None) -> dict[Path, Format]:
    """Returns the formats of a result's exported files, by path. The files are model.onnx and the file for `to`."""
    formats = [onnx, None if to is None else parse_format(to)]  # if `to` is ONNX too, it replaces `onnx`
    return {result_path(folder, form): form for form in formats if form is not None}


def evidence_of(path: Path) -> Path:
    """Returns the path of a file's evidence in a result folder, evidence-FORMAT.json."""
    return path.with_name(f"{evidence_stem(path.stem)}.json")


def with_file(evidence: Evidence, of_file: Evidence, name: str, form: str) -> Evidence:
    """Returns a model's evidence, in which all findings about outputs were measured on the model's file."""
    about = {**evidence.about, "checks": [*of_file.about["checks"], *evidence.about["checks"]]}
    for key in ("notes", "warnings"):
        about[key] = list(dict.fromkeys((*of_file.about[key], *evidence.about[key])))
    # The user's metric is measured on both the file and the model. Only the finding for the file is kept.
    of_outputs = {finding.check for finding in of_file.findings}
    of_model = (finding for finding in evidence.findings if finding.check not in of_outputs)
    return Evidence((*of_file.findings, *of_model), {**about, "file": name, "format": form})


def require_result_folder(folder: Path, model: nn.Module, files: Mapping[Path, Format]) -> None:
    """Raises InvalidInput if saving a result with these files would overwrite files that attnrx did not write."""
    require_no_sizes(folder)
    require_model_folder(folder)
    require_absent([folder / "report.html"], lambda path: file_kind(path) == REPORT)
    for path, form in files.items():
        exporting.require_replaceable_files(path, form.files(path))
        exporting.require_export_path(path, form, with_script=form.example(path) is not None and num_classes(model) > 0)
        require_absent([evidence_of(path)], lambda path: file_kind(path) == EVIDENCE)


def result_parts(fingerprint: str) -> ReplacedFiles:
    """Returns a function that names the files that `Shrunk.save` replaces for the model with this fingerprint.

    `Shrunk.save` replaces the model, its report, and exports of other models with their evidence. Exports of this model
    are kept, unless they are written again.
    """

    def parts(folder: Path, written: Collection[str]) -> set[str]:
        names = {each.name for each in folder.iterdir() if is_model_file(each)}
        names |= {"report.html"} if file_kind(folder / "report.html") == REPORT else set()
        for path, facts in present_exports(folder).items():
            model = facts.get("model")
            stored = model.get("fingerprint") if isinstance(model, Mapping) else None
            name = RESULT.fullmatch(path.stem)
            if (name and fingerprint != stored) or path.name in written:
                names |= {each.name for each in files_of_export(path, facts)}
                has_evidence = name and file_kind(evidence_of(path)) == EVIDENCE
                names |= {evidence_of(path).name} if has_evidence else set()
        # Facts and scripts without a file come from an export that was interrupted.
        paths = [folder / name for name in written]
        names |= {path.name for path in paths if path.suffix == ".json" and file_kind(path) in (EXPORTED, EVIDENCE)}
        return names | {script.name for path in paths if (script := present_script(path)) is not None}

    return parts
