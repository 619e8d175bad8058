"""`Shrunk`: the result of `shrink`, with the files of its folder.

Saving replaces the files of an earlier result, and never the files of others.
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
from attnrx.nouns.effort import final_rounds
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

REPORT_IMAGES, REPORT_MAPS = 8, 4  # how many test images the report shows, and how many with their maps


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller model with its prescription, its plan, and the evidence of what it cost.

    It unpacks as `model, prescription, evidence`.

    Attributes:
        model: The smaller model.
        prescription: What was pruned, and how; None for the unchanged model.
        evidence: The comparison with the original.
        plan: The plan with its predictions; None for the unchanged model.
        target: The target of the call.
        diagnosis: The diagnosis of the original, for the report.
        samples: A few normalized test images [images, channels, height, width] with their classes, for the report.
        class_names: The classes of the data, for exported files.
        images: The images that the model was planned and verified on.
        maps: The maps that the original and the smaller model return for some samples, for the report; None for other
            outputs.
        timed_in_kernels: Whether latency was measured in attnrx's kernels. If latency was the target too, the model is
            accelerated.
        form: The format of the file to write, as text; None without `to`. It is the `to` of the call, or another
            format in which the unchanged model is better than the plan.
        file: The file of this format that the evidence is about. It exists as long as it is in use, and `save` copies
            it.
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
        """Returns the result with a model of its own class, accelerated if that is how its speed was measured."""
        model = library_form(self.model)
        in_kernels = self.target.minimized == "latency" and self.timed_in_kernels
        is_kernel = in_kernels and is_working(self.model) and record_of(model) is not None
        return replace(self, model=accelerate(model) if is_kernel else model)

    @property
    def summary(self) -> Sentence:
        """The result in one sentence: speed with its factors, accuracy, costs.

        It says if the images were drawn at random. You may also call it: `shrunk.summary()`.
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
        """Writes a folder: the model with prescription, evidence and card, the report, and a file for ONNX Runtime.

        Everything is written to a new folder, which replaces the old one in one step. Files of an earlier result are
        replaced, exports of other models removed, and files that attnrx did not write kept.

        One file is written for deployment: model.onnx or, after `shrink(to=...)`, the file of that format, e.g.
        model-int8.onnx. The evidence of `shrink` is then about this file: its speed, its accuracy, its outputs. The
        file is calibrated on the images that the plan was made on, and verified on other images.

        If you pass another format as `to`, its file has its own evidence against the original, e.g. evidence-int8.json.
        Its speed is relative to the original in its own library at the precision of the file. The original's file of
        the same format is timed in turns with it, so you see what the format gave and what the compression gave.

        Args:
            folder: The folder.
            onnx: Whether to write model.onnx, even beside the file of another format; by default only if there is none.
            to: The format to write, e.g. "int8" or "openvino(precision=bf16)" (see `export`); by default the one that
                `shrink` was given.
            opset: The operator set version of model.onnx, 17 to 23. Choose a smaller one for a runtime or a tool that
                does not know the newest.
            original: The model that you gave `shrink`. With it, model.onnx is timed beside the same file of the
                original, for `reports.files_table`. You need it for a `to` that you did not give `shrink`.
            batch: For `to`: the images of a timed batch.
            threads: CPU threads of the timings (torch's default).

        Returns:
            The folder.

        Raises:
            InvalidInput: A file that attnrx did not write would be overwritten; nothing was changed.
            AttnrxError: The model cannot be exported; everything else was saved.
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
            except AttnrxError as error:  # a file that cannot be written must not lose hours of work
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
        """Writes model.onnx, or the file of another format with its evidence, to a folder that does not have it yet.

        With the original, model.onnx has its speed beside the original's.
        """
        is_of_format, images = to is not None and form == parse_format(to), self.images
        # `save_with` has refused a model that is not the one that the evidence, and so the file, is about.
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
                rounds = final_rounds(timed, family_of(original).costs(original).macs)
                exporting.compare_with_original(file, original, threads=threads, batches=(timed,), rounds=rounds)
            return
        assert original is not None and images is not None  # `save` needs the original, and `shrink` returns images
        conditions = Conditions(file.images.device, file.images.precision, threads)
        protocol = final_protocol(conditions, batch, original)
        speed = 1 / self.target.limit if self.target.quantity == "latency" else None
        tested, latency = images.verified, Latency(batch, protocol, speed, library=True)
        about = {"target": str(self.target), "file": path.name, "format": to}
        try:
            checks = with_accuracy(tested, original, *checks_of(self.target, original, tested), latency)
            evidence = verify(file, original, tested, checks, about, batch_size=32)
        except AttnrxError:
            exporting.remove_export(path)  # no file without evidence
            raise
        evidence.save(evidence_of(path))

    def has_evidence_of(self, to: str) -> bool:
        """Whether the evidence is about the file of this format."""
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
    """Returns some images with their classes, and both models' maps of the first of them, for the report.

    Both are None if the inputs are not pictures. The maps are None for other outputs.
    """
    if not getattr(family_of(original).inputs(original), "is_plain", True):
        return None, None
    samples = first_images(images, class_names, REPORT_IMAGES)
    if samples is None or not isinstance(output_kind_of(original), Map):
        return samples, None
    shown, labels = samples[0][:REPORT_MAPS], samples[1][:REPORT_MAPS]
    return samples, sample_maps({"original": original, "this model": model}, shown, labels)


def checks_of(target: Target, model: nn.Module, images: ImageSet) -> tuple[Check, ...]:
    """Returns the checks of the outputs; for embeddings also a search in an old index.

    A target of divergence or recall sets the limit of its check.
    """
    fidelity = Fidelity(most_divergence=target.limit if target.quantity == DIVERGENCE else None)
    is_searched = isinstance(output_kind_of(model), Embeddings) and len(images) >= Index.least
    if not is_searched:
        return (fidelity,)
    return fidelity, Index(least_recall=100 * target.limit if target.quantity == RECALL else None)


def with_accuracy(images: ImageSet, model: nn.Module, *checks: Check) -> tuple[Check, ...]:
    """Returns the checks, preceded by the check of accuracy if the images have labels and the model makes decisions."""
    has_accuracy = images.has_labels and output_kind_of(model).has_decisions
    return (Accuracy(None), *checks) if has_accuracy else checks  # reported, without a limit


RESULT = re.compile(r"model(-\w+)?")  # the stems of exported files in a folder of results


def result_files(folder: Path, onnx: Onnx | None, to: str | None) -> dict[Path, Format]:
    """Returns the formats of the exported files of a result by their paths: model.onnx, and the file of a format."""
    formats = [onnx, None if to is None else parse_format(to)]  # the format replaces model.onnx, if it is ONNX
    return {result_path(folder, form): form for form in formats if form is not None}


def evidence_of(path: Path) -> Path:
    """Returns the path of the evidence of a file in a folder of results: evidence-FORMAT.json."""
    return path.with_name(f"{evidence_stem(path.stem)}.json")


def with_file(evidence: Evidence, of_file: Evidence, name: str, form: str) -> Evidence:
    """Returns the evidence of a model, with the findings on the outputs of its file in place of the model's."""
    about = {**evidence.about, "checks": [*of_file.about["checks"], *evidence.about["checks"]]}
    for key in ("notes", "warnings"):
        about[key] = list(dict.fromkeys((*of_file.about[key], *evidence.about[key])))
    # Your own metric is measured on both, so the model's finding is left out.
    of_outputs = {finding.check for finding in of_file.findings}
    of_model = (finding for finding in evidence.findings if finding.check not in of_outputs)
    return Evidence((*of_file.findings, *of_model), {**about, "file": name, "format": form})


def require_result_folder(folder: Path, model: nn.Module, files: Mapping[Path, Format]) -> None:
    """Raises InvalidInput if results with these files would overwrite files that attnrx did not write."""
    require_no_sizes(folder)
    require_model_folder(folder)
    require_absent([folder / "report.html"], lambda path: file_kind(path) == REPORT)
    for path, form in files.items():
        exporting.require_replaceable_files(path, form.files(path))
        exporting.require_export_path(path, form, with_script=form.example(path) is not None and num_classes(model) > 0)
        require_absent([evidence_of(path)], lambda path: file_kind(path) == EVIDENCE)


def result_parts(fingerprint: str) -> ReplacedFiles:
    """Returns the files that `Shrunk.save` replaces for the model with this fingerprint.

    These are the model, its report, and exports of other models with their evidence. Exports of this model stay unless
    they are written again.
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
