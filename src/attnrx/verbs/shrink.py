"""`shrink`: the whole workflow in one call. Divides the images, plans, realizes and fits, and verifies a smaller model.

`Shrunk` is its result, with the files of its folder: saving replaces those of an earlier result, and never those of
others. `elastic` runs the same steps for several targets.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from attnrx.change import exporting
from attnrx.change.exporting import Format, parse_format
from attnrx.change.exporting.exported import KIND as EXPORTED
from attnrx.change.exporting.exported import files_of_export, present_exports, present_script
from attnrx.change.realization import realize_and_fit
from attnrx.change.realization.decoding import fit_decoder, map_share, smaller_decoder
from attnrx.change.realization.distillation import HELD_OUT, Distill
from attnrx.change.realization.realizing import Fit, fits_record
from attnrx.change.realization.repair import Repair
from attnrx.data import Columns, FixedImages, ImageData, ImageSet, Parts, Splits, load_data, require_labels, three_parts
from attnrx.data.fixed_images import ONE_DRAW
from attnrx.data.model_data import ModelBatches, adapt_preprocessing, num_classes, splits_for
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning import Plan, PlanSettings, Target, plan_sharing
from attnrx.decide.planning.measured_costs import file_speeds, final_protocol, rounds_of
from attnrx.decide.planning.planner import Planner
from attnrx.decide.planning.space import DROP, target_of
from attnrx.decide.planning.uniform import portable_form, require_portable
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import KIND as EVIDENCE
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Accuracy, Check, Costs, Fidelity, Latency, Promises
from attnrx.show.reports import (
    MapSamples,
    ReportContent,
    first_images,
    sample_maps,
    sample_tokens,
    summary_of,
    write_report,
)
from attnrx.support.arguments import COUNT, FASTER, checked, instance, number, optional
from attnrx.support.atomic_writes import Parts as ReplacedFiles
from attnrx.support.atomic_writes import file_lock, require_absent
from attnrx.support.display import Sentence
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported, TargetMet
from attnrx.support.progress import Log, begin, no_log, phases
from attnrx.support.shapes import ImageBatch
from attnrx.support.storage import REPORT, file_kind
from attnrx.support.subprocess_runner import shared_subprocess
from attnrx.verbs.load import load, preflight
from attnrx.verbs.save import require_no_sizes, save_with
from attnrx.verbs.verify import verify
from attnrx.vit.costs import Conditions
from attnrx.vit.maps import REALIZED_NORMS
from attnrx.vit.models import (
    accepting,
    at_size_of,
    family_of,
    is_model_file,
    library_form,
    model_fingerprint,
    reduction_of,
    require_model_folder,
)
from attnrx.vit.models.boundary.acceleration import accelerate
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.models.boundary.working_copy import is_working
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.outputs import Divergence, Map, Metric, judged, most_images, output_kind_of

# The images that the diagnosis is made on, and those that the predictions of the plan are measured on.
DIAGNOSIS_IMAGES, PREDICTION_IMAGES = 128, 96
# A quick call for a model of more than LARGE multiply-accumulates per image diagnoses on half of them, and measures
# sensitivities on half of the usual ones, of outputs with a number per position on so many at least. For one of more
# than HUGE (a ViT-L has 6e10) it plans on half of all images, with sensitivities in half of the layers, and diagnoses
# on a quarter. Plans of both are compared and repaired in bfloat16 where that is faster (docs/results/plan.md).
LARGE, HUGE, MIN_SENSITIVITY_IMAGES = 2.5e9, 4e10, 8
# A target of latency that saves less is planned with the whole decoder, which could otherwise meet it alone.
LARGEST_DECODER = 0.2
# The most images that a result is verified on, of which an accuracy has a standard error of 0.5 points at most.
MAX_VERIFICATION_IMAGES = 10_000
# A quick call verifies on as many images as take so many multiply-accumulates in the original, and on so many at least:
# on 4,800 of a ViT-Tiny, 340 of a ViT-B.
QUICK_MACS, MIN_QUICK_IMAGES = 6e12, 256
# Outputs with a number per position vary less between images, so that both numbers are smaller: of 128 the mean error
# of a saliency map has an interval of +- 20 %, of 324 of +- 13 % (docs/results/dense.md).
MAP_MACS, MIN_MAPS = 7.5e11, 64
REPORT_IMAGES, REPORT_MAPS = 8, 4  # test images in the report, and those whose maps it shows

# By effort, the number of images that the weights of a realized plan are fitted to, and the fits. Within its budget of
# multiply-accumulates a repair takes fewer images and steps.
FITS_BY_EFFORT: Mapping[str, tuple[int, tuple[Fit, ...]]] = {
    # A ViT-Tiny needs 2e12 for all images; larger models have LEAST_IMAGES and half of the steps. 512 images and steps
    # on four of them take 1.6 times the CPU time for the same divergence (docs/results/plan.md).
    "quick": (256, (Repair(100, images=2, macs=3.5e12),)),
    # The distillation takes 14 % of the divergence of a plan of one image for eager PyTorch, in 131 s on two threads.
    "normal": (1024, (Repair(300, macs=1e14), Distill(2))),
    # At 60 % of the parameters 0.376 nats, with 1,024 images and 300 steps 0.420 (docs/results/plan.md). The tokens of
    # the images that the budget leaves of a ViT-L are in memory seven times, in 12 GB.
    "thorough": (3072, (Repair(500, macs=4e14), Distill(2))),
}

# A normal call does not distill models of more multiply-accumulates per image: a ViT-S has 4.6e9.
MOST_DISTILLED = 5e9

# The phases of `shrink` and their usual shares of the time of a quick call for MACs (`progress.Phases`). Those before
# the repair are seconds of CPU time of a ViT-Tiny at 224 pixels on one thread of a loaded machine (2026-11).
PHASE_SHARES = {
    "loading the model": 3.0,
    "reading the images": 8.0,
    "diagnosing": 16.0,
    "measuring costs": 1.0,
    "measuring sensitivities": 19.0,
    "searching plans": 30.0,
    "predicting on other images": 7.0,
    "realizing and repairing": 54.0,
    "distilling": 0.0,
    "verifying": 20.0,
    "measuring speed": 0.0,
}

MODEL_OR_NAME = instance("a model, a folder or a name, e.g. 'timm:vit_tiny_patch16_224'", nn.Module, str, Path)
BELOW_ONE = number(0.0, math.nextafter(1.0, 0.0), "a share of the original's above 0 and below 1, e.g. 0.6")
POINTS = number(0.0, 100.0, "points of accuracy from 0 to 100, e.g. 1", above=False)


# The result, and the files of its folder ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller model with its prescription, its plan, and the evidence of what it cost.

    It unpacks as `model, prescription, evidence`.

    Attributes:
        model: The smaller model.
        prescription: What was pruned, and how; None for the unchanged model, which meets the target by its kernels.
        evidence: The comparison with the original.
        plan: The plan with its predictions; None for the unchanged model.
        target: The target of the call.
        diagnosis: The diagnosis of the original, for the report.
        samples: A few normalized test images [images, channels, height, width] with their classes, for the report.
        class_names: The classes of the data, for exported files.
        images: The images that it was planned and verified on.
        maps: The maps that the original and the smaller model return for some samples, for the report; None for other
            outputs.
        timed_in_kernels: Whether a target of latency is that in attnrx's kernels, so that the model is accelerated.
    """

    model: nn.Module
    prescription: Prescription | None
    evidence: Evidence
    plan: Plan | None
    target: Target
    diagnosis: Diagnosis | None = None
    samples: tuple[ImageBatch, tuple[str, ...]] | None = None
    class_names: tuple[str, ...] = ()
    images: Parts | None = None
    maps: MapSamples | None = None
    timed_in_kernels: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.prescription, self.evidence))

    @property
    def is_portable(self) -> bool:
        """Whether the model is one that its own library creates, loads and saves."""
        return bool(self.evidence.about.get("portable"))

    def in_library_form(self) -> "Shrunk":
        """Returns the result with a model of its own class, accelerated where its speed was measured so."""
        model = library_form(self.model)
        in_kernels = self.target.minimized == "latency" and self.timed_in_kernels
        is_kernel = in_kernels and is_working(self.model) and record_of(model) is not None
        return replace(self, model=accelerate(model) if is_kernel else model)

    @property
    def summary(self) -> Sentence:
        """The result in one sentence: speed with its factors, accuracy, costs; with a note on images that were a draw
        of random ones. It may be called, too.
        """
        draws = [note for note in self.images.notes if ONE_DRAW in note] if self.images is not None else []
        return Sentence("; ".join((summary_of(self.evidence), *draws)))

    def __repr__(self) -> str:
        return f"Shrunk({self.summary})"

    @checked()
    def save(
        self,
        folder: Path | str,
        onnx: bool = True,
        *,
        to: str | None = None,
        original: nn.Module | None = None,
        batch: int = 32,
        threads: int | None = None,
    ) -> Path:
        """Writes a folder: the model with prescription, evidence and card, the report, and a file for ONNX Runtime.

        Everything is written to a new folder, which replaces the old one in one step: files of an earlier result are
        replaced, and exports of other models removed; files that attnrx did not write are kept.

        A file of the format `to` is named after it, model-int8.onnx, and so is the evidence of what it costs against
        the original, evidence-int8.json. It is calibrated on the images that the plan was made on, and verified on
        those that neither has seen. Its speed is that in the runtime of the format, relative to the original in its own
        library at the precision of the file, which is the model's own or else float32. The original's file of the same
        format is timed in turns with it, so that the speed is divided into what the format gave and what the
        compression gave.

        Args:
            folder: The folder.
            onnx: Whether model.onnx is written.
            to: Another format to write, e.g. "int8" or "openvino(precision=bf16)" (see `export`).
            original: The model that `shrink` was given; with it model.onnx is timed beside the same file of the
                original, for `reports.files_table`. `to` needs it.
            batch: For `to`, the images of a timed batch.
            threads: CPU threads of the timings (torch's default).

        Returns:
            The folder.

        Raises:
            InvalidInput: A file would be overwritten that attnrx did not write; nothing was changed.
            AttnrxError: The model cannot be exported; everything else was saved.
        """
        folder = Path(folder)
        files = result_files(folder, onnx, to)
        preflight(folder=folder, formats=files.values(), report=True)
        require_result_folder(folder, self.model, files)
        original = None if original is None else at_size_of(original, self.model)
        if to is not None and original is None:
            raise InvalidInput(f"to={to!r} needs the original, which the evidence of the file is against; give it.")
        failures: list[AttnrxError] = []

        def write_others(new: Path) -> None:
            write_report(new / "report.html", self.report(f"attnrx: {folder.name}"))
            try:
                for path, form in files.items():
                    self._write_exported(new / path.name, form, to, original, batch, threads)
            except AttnrxError as error:  # hours of work are not lost by a file that cannot be written
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
        """Writes a file to a folder that has none: model.onnx with its speed beside the original's, if that is given,
        or the file of another format with its evidence.
        """
        is_onnx, images = path.stem == "model", self.images
        calibration = None if is_onnx or images is None else images.planned
        settings = {"precision": exporting.precision_for(self.model, form), "calibration": calibration}
        names = exporting.fitting_names(self.model, self.class_names)
        file = exporting.export(self.model, path, to=form, class_names=names, **settings)
        if is_onnx:
            if original is not None and self.prescription is not None:
                timed = int(self.evidence.about.get("batch", 32))
                rounds = rounds_of(timed, original)
                exporting.compare_with_original(file, original, threads=threads, batches=(timed,), rounds=rounds)
            return
        assert original is not None and images is not None  # `save` needs the original, and `shrink` returns images
        conditions = Conditions(file.images.device, file.images.precision, threads)
        protocol = final_protocol(conditions, batch, original)
        speed = 1 / self.target.limit if self.target.quantity == "latency" else None
        tested, latency = images.verified, Latency(batch, protocol, speed, library=True)
        about = {"target": str(self.target), "file": path.name, "format": to}
        try:
            checks = with_accuracy(tested, original, Fidelity(), latency)
            evidence = verify(file, original, tested, checks, about, batch_size=32)
        except AttnrxError:
            exporting.remove_export(path)  # no file without evidence
            raise
        evidence.save(evidence_of(path))

    def report(self, title: str) -> ReportContent:
        """Returns the content of the report, with the tokens of the sample images if tokens are pruned or merged."""
        tokens = None
        if self.samples is not None and reduction_of(self.model) is not None:
            with suppress(InvalidInput):  # patches that are no grid cannot be drawn
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


def with_accuracy(images: ImageSet, model: nn.Module, *checks: Check) -> tuple[Check, ...]:
    """Returns the checks, preceded by that of the accuracy if the images have labels and the model makes decisions."""
    has_accuracy = images.has_labels and output_kind_of(model).has_decisions
    return (Accuracy(None), *checks) if has_accuracy else checks  # reported, without a limit


RESULT = re.compile(r"model(-\w+)?")  # the stems of exported files in a folder of results


def result_files(folder: Path, onnx: bool, to: str | None) -> dict[Path, Format]:
    """Returns the formats of the exported files of a result by their paths: model.onnx, and the file of a format."""
    files = {folder / "model.onnx": parse_format("onnx")} if onnx else {}
    if to is not None:
        form = parse_format(to)
        files[folder / f"model-{form.name}{form.suffix}"] = form
    return files


def evidence_of(path: Path) -> Path:
    """Returns the path of the evidence of model-FORMAT.SUFFIX in a folder of results."""
    return path.with_name(f"evidence{path.stem.removeprefix('model')}.json")


def require_result_folder(folder: Path, model: nn.Module, files: Mapping[Path, Format]) -> None:
    """Raises InvalidInput if results with these files would overwrite files that attnrx did not write."""
    require_no_sizes(folder)
    require_model_folder(folder)
    require_absent([folder / "report.html"], lambda path: file_kind(path) == REPORT)
    for path, form in files.items():
        exporting.require_replaceable_files(path, form.files(path))
        exporting.require_export_path(path, form, with_script=form.example(path) is not None and num_classes(model) > 0)
        if path.stem != "model":
            require_absent([evidence_of(path)], lambda path: file_kind(path) == EVIDENCE)


def result_parts(fingerprint: str) -> ReplacedFiles:
    """Returns the files that `Shrunk.save` replaces for the model with this fingerprint.

    These are the model, its report, and exports of other models with their evidence; exports of this model stay, unless
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
                has_evidence = name and name[1] and file_kind(evidence_of(path)) == EVIDENCE
                names |= {evidence_of(path).name} if has_evidence else set()
        # Facts and scripts without a file are those of an export that was interrupted.
        paths = [folder / name for name in written]
        names |= {path.name for path in paths if path.suffix == ".json" and file_kind(path) in (EXPORTED, EVIDENCE)}
        return names | {script.name for path in paths if (script := present_script(path)) is not None}

    return parts


# The call -------------------------------------------------------------------------------------------------------------


@checked(
    model=MODEL_OR_NAME,
    faster=optional(FASTER),
    macs=optional(BELOW_ONE),
    params=optional(BELOW_ONE),
    max_drop=optional(POINTS),
    multiple=optional(COUNT),
)
@judged
@verb
def shrink(  # noqa: PLR0913  (a keyword for every target)
    model: nn.Module | str | Path,
    data: ImageData | Splits | str | Path,
    *,
    faster: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    max_drop: float | None = None,
    batch: int = 32,
    threads: int | None = None,
    effort: Literal["quick", "normal", "thorough"] = "quick",
    to: str | None = None,
    portable: bool = False,
    multiple: int | None = None,
    inputs: Callable[[Any], Any] | None = None,
    weights: str | Path | None = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    seed: int = 0,
    log: Log = no_log,
    divergence: Divergence | None = None,
    metric: Metric | None = None,
) -> Shrunk:
    """Makes a model smaller for one target, without labels, and verifies it on images that the plan has not seen.

    The target is one of `faster`, `macs`, `params` and `max_drop`. The data are read once, as many images as the effort
    needs and at most 10,000 to verify on (with the effort "quick" as many as take 6e12 multiply-accumulates, or 256);
    random transforms and samplers are one draw of `seed`. Of data with splits the plan sees training and validation
    images, and the evidence is about test images; other data are divided into three parts. No two parts have images of
    the same pixels.

    The result is the unchanged model if that is as fast as requested, by its kernels or by the format, or if its file
    in the format `to` is faster than that of the smaller model.

    Args:
        model: A model, or what `load` reads.
        data: Images in any form that `load_data` or `data.image_set` reads, or `Splits`.
        faster: The speed-up, e.g. 1.6, measured on this machine.
        macs: The share of the MACs that stays, e.g. 0.5.
        params: The share of the parameters that stays, e.g. 0.7.
        max_drop: The points of accuracy that may be lost, e.g. 1pt.
        batch: Images per forward pass whose latency is measured.
        threads: CPU threads of that forward pass (torch's default).
        effort: How much is measured: quick (minutes), normal or thorough; both also distill the model from the
            original at the end, normal only one of at most 5e9 MACs per image.
        to: The format of a file that `faster` is about (see export), e.g. int8 or 'openvino(precision=bf16)': the plan
            is made with the latency of blocks in the runtime of the format; `Shrunk.save(to=...)` writes the file.
        portable: The result is a model of the library's own class, with other sizes, and `Shrunk.save` writes the
            checkpoint of the library, which loads it without attnrx (see `save`). One width for all MLPs is pruned, and
            heads where the class states their number; `faster` is then the speed in the library's own code.
        multiple: Of a portable model the number that its width is a multiple of; 8 by default.
        inputs: What the forward of a module of your own takes, of every batch: `inputs(batch)` returns a tensor, a
            tuple of arguments or a mapping of named ones. By default the batch is one of images.
        weights: The weights of a model `timm:NAME` or `lvvit:SIZE`, in a local file.
        columns: The columns of images and labels, for tables.
        folder: Where `Shrunk.save` will write the results; files there that attnrx did not write are refused before the
            work. One call at a time uses a folder.
        seed: Seeds every random draw.
        log: Receives a line for every step.
        divergence: Your measure of how far outputs are from the original's, `divergence(original, smaller)`: one number
            per image, 0 for equal outputs. The plan, the fits and the evidence use it; a fit, where it has gradients.
        metric: Your measure of the outputs, `metric(outputs, (images, labels))`, for the evidence (see `verify`).

    Returns:
        The smaller model with its prescription, plan and evidence.

    Raises:
        InvalidInput: Not exactly one target, labels that do not fit, or a `folder` in which the results would overwrite
            files that attnrx did not write.
        CheckpointError: Another process or thread uses the folder.
        NotSupported: No plan reaches the target, or a portable model of a class that states no width of its MLPs.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> shrunk = rx.shrink(vit, torch.randn(96, 3, 32, 32), macs=0.7)  # or a DataLoader, a dataset ...
        >>> answers = shrunk.model(torch.randn(1, 3, 32, 32))
        >>> folder = shrunk.save("faster")
    """
    target = target_of(faster, macs, params, max_drop)
    form = None if to is None else parse_format(to)
    portability = portable_settings(portable, multiple)
    preflight(data=data, columns=columns, folder=folder, formats=() if form is None else (form,))
    # What `Shrunk.save` will lack, before hours of work; not an error, because the result need not be saved.
    for check in (partial(preflight, report=True), partial(preflight, formats=(parse_format("onnx"),))):
        try:
            check()
        except NotSupported as missing:
            log(f"for Shrunk.save: {missing}")
    # One process for all latency measurements, which starts while the images are read.
    one_process = shared_subprocess() if target.minimized == "latency" else nullcontext()
    one_call = nullcontext() if folder is None else file_lock(folder, seconds=0.0)
    with one_call, phases(phase_shares(target.minimized, effort, portable), log), one_process:
        data = ModelBatches.of(data, inputs)
        original = load_original(model, weights, data)
        if folder is not None:  # before the work
            require_result_folder(Path(folder), original, result_files(Path(folder), True, to))
        if portable:  # before the work
            require_portable(original, multiple)
        conditions = replace(timing_conditions(original, threads, batch, form, log), plain=portable)
        if conditions.on_cuda and target.minimized != "latency":
            log("on a CUDA device fewer MACs are not less time: faster=N plans for its time (docs/results/gpu.md)")
        about = {"batch": batch, "conditions": conditions, "to": to, "seed": seed, "log": log, **portability}
        settings = PlanSettings.preset(effort, portable=portable, **about)
        # For a latency in PyTorch that the decoder alone is not expected to reach.
        decoder = target.quantity == target.minimized == "latency" and to is None and target.limit < 1 - LARGEST_DECODER
        decoder = decoder and not portable
        run = ShrinkRun.start(original, data, columns, effort, settings, decoder)
        if target.quantity == DROP:
            require_labels(run.images.planned)
        try:
            return run.result(target)
        except TargetMet as met:
            # The kernels of attnrx, or the format, reach the speed alone: nothing has to be removed.
            log(str(met))
            return run.unchanged(target)


def portable_settings(portable: bool, multiple: int | None) -> dict[str, int]:
    """Returns the multiple of the width of a portable model; empty where none was given.

    Raises:
        InvalidInput: A multiple without a portable model.
    """
    if multiple is not None and not portable:
        raise InvalidInput(f"multiple={multiple} is that of a portable model: give portable=True, too.")
    return {} if multiple is None else {"multiple": multiple}


def phase_shares(spend: str, effort: str, portable: bool = False) -> dict[str, float]:
    """Returns the phases of a call for a target of this cost, with their usual shares of the time."""
    shares = dict(PHASE_SHARES)
    if spend == "latency":
        # Blocks are timed, and so are whole plans. Seconds of wall clock on one thread of an idle machine (2026-11).
        shares |= {"diagnosing": 11.0, "measuring costs": 18.0, "measuring sensitivities": 12.0}
        shares |= {"searching plans": 34.0, "realizing and repairing": 34.0, "measuring speed": 50.0}
    if any(isinstance(fit, Distill) for fit in FITS_BY_EFFORT[effort][1]):
        shares["distilling"] = 150.0
    if portable:  # plans of few sizes are compared by themselves
        shares["measuring sensitivities"] = 0.0
    return {name: share for name, share in shares.items() if share}


def load_original(model: nn.Module | str | Path, weights: str | Path | None, data: Any) -> nn.Module:
    """Loads the model, with the inputs of the first batch of the data where those are no images."""
    begin("loading the model")
    batches = next(iter(data.values())) if isinstance(data, Mapping) and data else data
    inputs = batches.example() if isinstance(batches, ModelBatches) else None
    return load(model, weights=weights, inputs=inputs).eval()


def timing_conditions(
    model: nn.Module, threads: int | None, batch: int, form: Format | None = None, log: Log = no_log
) -> Conditions:
    """Returns the conditions of the timings: the model's own precision if it is timed, or that of files of a format; on
    a CUDA device recorded graphs, if the model can be recorded.
    """
    # Of models in float64 neither is timed at its own.
    weight = next(model.parameters())
    precision = exporting.precision_for(model, form or parse_format("program")) or exporting.dtype_name(weight.dtype)
    # On one thread latency can be measured by CPU time (`PlanTimer.settings`).
    threads = 1 if threads is None and torch.get_num_threads() == 1 else threads
    conditions = Conditions(str(weight.device), precision, threads)
    if not conditions.on_cuda or form is not None:
        return conditions
    # Eager passes of fewer than some hundred images take the time in which the processor launches their kernels, which
    # is that of a busy processor, and hardly depends on what is removed.
    recorded = replace(conditions, graphs=True)
    images = recorded.prepare_images(torch.zeros(batch, *family_of(model).input_shape(model)))
    try:
        with recorded.held():
            recorded.prepare(model)(images)
    except NotSupported as problem:
        log(f"timed without CUDA graphs: {problem}")
        return conditions
    log("timed as CUDA graphs (Conditions(graphs=True).prepare records the result the same way)")
    return recorded


@dataclass(frozen=True, eq=False)
class ShrinkRun:
    """What every target of one call shares: the original, its diagnosis, and the images by their use."""

    original: nn.Module
    diagnosis: Diagnosis
    planned: FixedImages  # the images that the plan is chosen on, which are among those that weights are fitted to
    images: Parts
    class_names: tuple[str, ...]
    settings: PlanSettings
    about: Mapping[str, Any]
    planned_model: nn.Module  # the original, or a copy of it with a smaller decoder
    measured: dict[str, Planner] = field(default_factory=dict)  # for plans, by cost

    @classmethod
    def start(
        cls,
        original: nn.Module,
        data: Any,
        columns: Columns | None,
        effort: str,
        settings: PlanSettings,
        decoder: bool = False,
    ) -> "ShrinkRun":
        """Divides the images and diagnoses the model."""
        log, seed = settings.log, settings.seed
        begin("reading the images")
        kind = output_kind_of(original)
        settings = settings.for_outputs(kind)
        # Repair fits many more numbers than a plan chooses, and takes more images; those of the plan are among them.
        fitted = max(round(FITS_BY_EFFORT[effort][0] * kind.needed_images**0.5), settings.num_images)
        predicted = round(PREDICTION_IMAGES * kind.needed_images**0.5)
        if isinstance(data, str | Path):
            data = adapt_preprocessing(load_data(str(data), columns=columns), original)
        limit = fitted + predicted + MAX_VERIFICATION_IMAGES
        splits = splits_for(original, data, limit=limit, seed=seed)
        # What is chosen, what is predicted and what is reported are measured on disjoint images: a plan is the best of
        # many on its own images, so its divergence there is too low.
        images = three_parts(splits, fitted, predicted, MAX_VERIFICATION_IMAGES)
        for line in (images.summary, *images.notes):
            log(line)
        original, splits = _at_size_of(images.planned, original, splits, log)
        images = _verified_on(images, most_images(original), "the outputs are large", log)
        share, macs = 1.0, family_of(original).costs(original).macs if effort == "quick" else 0
        if macs:
            is_map = kind.needed_images < 1
            budget, least = (MAP_MACS, MIN_MAPS) if is_map else (QUICK_MACS, MIN_QUICK_IMAGES)
            images = _verified_on(images, max(round(budget / macs), least), "a quick call", log)
            if is_map:
                images, settings, share = _fewer_maps(images, settings, macs)
        settings = replace(settings, bfloat16=macs > LARGE)
        if macs > HUGE:
            settings = replace(settings.on_share(0.5), layer_stride=2 * settings.layer_stride)
        elif macs > LARGE:
            fewer = max(settings.sensitivity_images // 2, MIN_SENSITIVITY_IMAGES)
            settings = replace(settings, sensitivity_images=min(fewer, settings.sensitivity_images))
        planned = images.planned.take(min(settings.num_images, len(images.planned)))
        planned_model = original
        begin("diagnosing")
        if decoder and (smaller := smaller_decoder(original, images.planned, settings.seed)) is not None:
            planned_model, divergence = smaller
            # The search of ten plans gained 5 % in 53 CPU seconds, of which the fit of the decoder needs fewer.
            settings = replace(settings, trials=-(-settings.trials // 2))
            units = " + ".join(str(cut.units) for cut in planned_model.around.cuts)
            log(f"decoder: {units} channels are left; divergence {divergence:.3g}, before the plan")
        parts = 1 + (macs > LARGE) + 2 * (macs > HUGE)
        wanted = round(share * DIAGNOSIS_IMAGES * output_kind_of(original).needed_images ** 0.5) // parts
        diagnosed = planned.take(min(wanted, len(planned)))
        diagnosis = diagnose(planned_model, diagnosed, moments=True, batch_size=32)
        about = {"effort": effort, "batch": settings.batch, "planned_on": planned.fingerprint}
        about |= {"portable": True} if settings.portable else {}
        return cls(original, diagnosis, planned, images, splits.class_names, settings, about, planned_model)

    def result(self, target: Target) -> Shrunk:
        """Returns the smaller model of a target: plans, realizes, fits and verifies it."""
        log, batch, images = self.settings.log, self.settings.batch, (self.planned, self.images.predicted)
        shared = {"settings": self.settings, "reference": self.original}
        plan = plan_sharing(self.planned_model, self.diagnosis, target, *images, self.measured, **shared)
        begin("realizing and repairing")
        chosen = plan.with_predictions
        slim, fits = self._realized(chosen, bool(plan.about["bfloat16"]), log)
        if self.settings.portable:
            slim = portable_form(slim, self.original, self.images.planned)
        if self.has_smaller_decoder:
            slim, line = fit_decoder(slim, self.original, self.images.planned, self.settings.seed)
            log(line)
            # The blocks are those of the original, which the prescription is about.
            chosen = replace(chosen, fingerprint=model_fingerprint(self.original))
        if self.settings.to is not None and self._is_slower(slim, target):
            return self.unchanged(target)
        # `attnrx realize` and the matched controls read this record, and repeat it.
        how = {"by": "compress", "norms": REALIZED_NORMS[0]}
        how |= {"calibration_images": len(self.images.planned), **fits_record(*fits)}
        prescription = replace(chosen, about={**chosen.about, "realized": how})
        rounds = rounds_of(batch, self.original)
        return self._verified(slim, target, plan, prescription, Promises(rounds=rounds))

    def _realized(self, prescription: Prescription, bfloat16: bool, log: Log) -> tuple[nn.Module, tuple[Fit, ...]]:
        """Realizes a plan and fits it as the effort states, in bfloat16 if its plans were compared in it; returns the
        fits that were possible too.
        """
        images, effort = self.images.planned, self.about["effort"]
        # Without its tokens the rules are those of ranks and units. Without any there is no map to repair. The fit of
        # a decoder gains more than a quick repair, in a quarter of the time.
        has_ranks = bool(replace(prescription, tokens=None).rules)
        repairs = has_ranks and not (self.has_smaller_decoder and effort == "quick")
        is_small = effort != "normal" or family_of(self.original).costs(self.original).macs <= MOST_DISTILLED
        possible = {Repair: repairs, Distill: is_small and len(images) >= 2 * HELD_OUT}
        fits = [replace(fit, seed=self.settings.seed) for fit in FITS_BY_EFFORT[effort][1] if possible[type(fit)]]
        fits = [replace(fit, bfloat16=bfloat16) if isinstance(fit, Repair) else fit for fit in fits]
        try:
            return realize_and_fit(self.planned_model, prescription, images, fits, log=log), tuple(fits)
        except (NotSupported, InvalidInput) as error:  # e.g. other MLPs, or fewer images than repair needs
            if not any(isinstance(fit, Repair) for fit in fits):
                raise
            log(f"not repaired: {error}")
        others = [fit for fit in fits if not isinstance(fit, Repair)]
        return realize_and_fit(self.planned_model, prescription, images, others, log=log), tuple(others)

    @property
    def has_smaller_decoder(self) -> bool:
        """Whether the plan is for a copy of the original with fewer channels in its decoder."""
        return self.planned_model is not self.original

    def _is_slower(self, model: nn.Module, target: Target) -> bool:
        """Whether the file of a model is slower than that of the original, in place of which it is not written; a model
        of fewer parameters is, because it need not be faster.
        """
        settings = self.settings
        models = {"unchanged": self.original, "smaller": model}
        # A file of the result that differed could not be saved.
        rounds = rounds_of(settings.batch, self.original)
        gain = file_speeds(models, settings, self.planned, rounds, are_compared=True)["smaller"]
        settings.log(f"as {settings.to}: {gain:.2f}x the speed of the unchanged model")
        if gain >= 1 or target.minimized == "params":
            return False
        settings.log(f"as {settings.to} the smaller model is slower, so the result is the unchanged one")
        return True

    def unchanged(self, target: Target) -> Shrunk:
        """Returns the original with the evidence of its speed relative to its own library, and with the smaller decoder
        that it was planned with.
        """
        batch = self.settings.batch
        speed = Latency(batch, final_protocol(self.settings.conditions, batch, self.original), library=True)
        return self._verified(self.planned_model, target, None, None, speed)

    def _verified(
        self, model: nn.Module, target: Target, plan: Plan | None, prescription: Prescription | None, last: Check
    ) -> Shrunk:
        """Verifies a model against the original; `last` is the check of what was promised."""
        begin("verifying")
        tested, names = self.images.verified, self.class_names
        checks = with_accuracy(tested, self.original, Fidelity(), Costs(), last)
        about = {"target": str(target), **self.about}
        context = {"prescription": prescription, "seed": self.settings.seed, "batch_size": 32}
        evidence = verify(model, self.original, tested, checks, about, **context)
        # Of pictures: others cannot be drawn.
        is_drawn = getattr(family_of(self.original).inputs(self.original), "is_plain", True)
        samples, maps = first_images(tested, names, REPORT_IMAGES) if is_drawn else None, None
        if samples is not None and isinstance(output_kind_of(self.original), Map):
            shown, labels = samples[0][:REPORT_MAPS], samples[1][:REPORT_MAPS]
            maps = sample_maps({"original": self.original, "this model": model}, shown, labels)
        # Of the blocks, which a copy with a smaller decoder shares with the original.
        diagnosis = replace(self.diagnosis, fingerprint=model_fingerprint(self.original))
        in_kernels = self.settings.to is None and self.settings.conditions.in_kernels
        parts = diagnosis, samples, names, self.images, maps, in_kernels
        return Shrunk(model, prescription, evidence, plan, target, *parts)


def _verified_on(images: Parts, most: int, reason: str, log: Log) -> Parts:
    """Returns the images with at most so many to verify on."""
    if len(images.verified) <= most:
        return images
    log(f"{reason}: verified on {most:,} of {len(images.verified):,} images")
    return images._replace(verified=images.verified.take(most))


def _fewer_maps(images: Parts, settings: PlanSettings, macs: float) -> tuple[Parts, PlanSettings, float]:
    """Returns as few images as a quick call takes of a model with a number per position and so many MACs, and their
    share: the more positions an image has, the less it varies.
    """
    share = map_share(macs)

    def some(part: ImageSet) -> ImageSet:
        return part.take(max(round(share**0.5 * len(part)), 1))

    images = images._replace(planned=some(images.planned), predicted=some(images.predicted))
    return images, settings.on_share(share), share


def _at_size_of(images: ImageSet, model: nn.Module, splits: Splits, log: Log) -> tuple[nn.Module, Splits]:
    """Returns the model, and the facts of the splits, at the size of the images."""
    shape = next(iter(images.take(1).batches(1))).images.shape[1:]
    fitting, before = accepting(model, tuple(shape)), family_of(model).input_shape(model)
    if fitting is model:
        return model, splits
    height, width = int(shape[1]), int(shape[2])
    log(f"images of {height} x {width} pixels: the model, made for {before[1]} x {before[2]}, is used at that size")
    side = height if height == width else (height, width)
    return fitting, replace(splits, image_size=side, channels=int(shape[0]))
