"""Compares a pruned model's exported file with files of the unchanged model, all measured in one run.

The runtime vendor's own tool writes the unchanged model as a float file and, with the tool's default settings, as an
8-bit file. attnrx also writes its own files of the unchanged model.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import nn

from attnrx.change.predictions import Predictions
from attnrx.data import ImageSet
from attnrx.exporting import (
    UNCHANGED,
    Baseline,
    Draft,
    Exported,
    Format,
    Onnx,
    OpenVINO,
    library_subject,
    temporary_files,
    vendor_title,
    with_8_bits,
    without_8_bits,
)
from attnrx.nouns.effort import PlanSettings
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.nouns.target import Target
from attnrx.show.checks import Comparison, Latency
from attnrx.show.checks.check import keeping_outputs
from attnrx.show.checks.costs import described_speed
from attnrx.show.checks.statistics import mean_estimate
from attnrx.show.reports.results import NOTHING_REMOVED
from attnrx.support.errors import AttnrxError, NotSupported
from attnrx.support.estimate import Estimate
from attnrx.support.progress import Log
from attnrx.support.records import to_dict
from attnrx.support.shapes import ImageBatch
from attnrx.vit.costs import Conditions, LatencyComparison, LatencyProtocol, compare_latencies
from attnrx.vit.models import family_of
from attnrx.vit.outputs import output_kind_of

# The number of test images that files are compared on. With 500 images the mean divergence varies by a few percent. All
# batch sizes divide this number, because OpenVINO would compile a file again for a smaller last batch. A runtime keeps
# the memory that a batch needed, so large models get the largest batch of at most COMPARED_MACS multiply-accumulates.
COMPARED_IMAGES, COMPARED_BATCHES, COMPARED_MACS = 500, (25, 5, 1), 6e10
RESULT, PLAN = "this result", "the plan, not saved"


@dataclass(frozen=True)
class MeasuredFile:
    """One file of a run.

    Attributes:
        title: The title of the file in logs and reports.
        form: The format of the file.
        is_own: Whether attnrx wrote the file, rather than the vendor's tool.
        speed: The file's speed relative to the run's baseline. The baseline is the vendor's file of the unchanged model
            in the requested precision, or attnrx's file if the vendor's tool failed.
        gain: The file's speed relative to attnrx's file of the unchanged model in the same run.
        divergence: The mean divergence of the file's outputs from the original's.
        unit: The unit of the divergence, e.g. "nats".
        images: The number of images on which the outputs were compared.
        agreement: The share of decisions (e.g. predicted classes) that equal the original's, in %. None for outputs
            without decisions.
        bytes: The size of the file in bytes.
        timing: The timings from which both speeds are computed.
        file: The exported file. It is deleted from the disk once no object refers to it.
    """

    title: str
    form: Format
    is_own: bool
    speed: Estimate
    gain: float
    divergence: Estimate
    unit: str
    images: int
    agreement: Estimate | None
    bytes: int
    timing: LatencyComparison
    file: Exported | None = None

    def dominates(self, other: "MeasuredFile") -> bool:
        """Returns whether this file is faster than another, with outputs that diverge no more from the original's."""
        return self.speed.value > other.speed.value and self.divergence.value <= other.divergence.value

    def finding(self, baseline: str) -> Finding:
        """Returns the file's speed as a finding, with the other measurements in its details."""
        details: dict[str, Any] = {
            "quantity": "file",
            "title": self.title,
            "format": to_dict(self.form),
            "divergence": to_dict(self.divergence, typed=False) | {"unit": self.unit},
            "agreement": None if self.agreement is None else to_dict(self.agreement, typed=False),
            "images": self.images,
            "bytes": self.bytes,
            "batch": self.timing.batch,
            "threads": self.timing.threads,
            "hardware": self.timing.hardware,
        }
        low, high = self.speed.low, self.speed.high
        claim = f"speed of {self.title} relative to {baseline}"
        return Finding("files", claim, self.speed.value, "x", low=low, high=high, n=self.timing.rounds, details=details)


@dataclass(frozen=True)
class FileRun:
    """The files that were measured in one run, by title. Speeds are relative to the file with the title `baseline`."""

    files: Mapping[str, MeasuredFile]
    baseline: str

    @property
    def result(self) -> MeasuredFile:
        return self.files[RESULT]

    @property
    def unchanged(self) -> MeasuredFile:
        return self.files[UNCHANGED]

    def chosen(self, instead: MeasuredFile | None) -> MeasuredFile:
        """Returns the file to deploy.

        If `instead` is not None, it is the file to deploy. Otherwise, it is the result's file or, if the run has no
        result, attnrx's file of the unchanged model.
        """
        return instead or self.files.get(RESULT, self.unchanged)

    def headline(self, file: MeasuredFile, least: float | None) -> tuple[Finding, ...]:
        """Returns findings about a file's speed relative to the baseline, and about its factors (runtime, compression).

        If `least` is not None, the finding about the speed checks that it is at least this value.
        """
        precision, unchanged = file.timing.conditions.precision, self.unchanged
        is_result = RESULT in self.files and file is self.result
        return described_speed(
            Latency(file.timing.batch),
            file.timing,
            self.baseline,
            file.form.runtime_at(precision),
            least,
            gained_by="attnrx's file",
            change=None if is_result or file is unchanged else str(file.form),
            unchanged_in=unchanged.form.runtime_at(precision),
        )

    def added_to(self, evidence: Evidence, target: Target, instead: MeasuredFile | None) -> Evidence:
        """Returns the evidence with the findings of this run.

        A warning is added if a file of the unchanged model is better than the result's file, or replaces it
        (`instead`).
        """
        headline = self.headline(self.chosen(instead), 1 / target.limit if target.quantity == "latency" else None)
        about, files = dict(evidence.about), list(self.files.values())
        if instead is not None:
            speed, loss = f"{instead.speed.value:.2f}x", f"{instead.divergence.value:.3f}"
            words = f"{instead.form} alone is {speed} as fast as {self.baseline}, at a divergence of {loss}"
            of_plan = f"The plan was {self.result.speed.value:.2f}x as fast, at {self.result.divergence.value:.3f}"
            text = f"{NOTHING_REMOVED}: {words}. {of_plan}"
            if instead is not self.unchanged:
                text += f". For a plan and {instead.form} together, give to={str(instead.form)!r}"
            about["warnings"] = [*about.get("warnings", ()), text]
            # The measured plan is not the result.
            files = [replace(file, title=PLAN) if file is self.result else file for file in files]
        elif RESULT in self.files and (better := self.better()):
            words = f"{better[0].title} of the unchanged model is faster, and no farther from the original"
            about["warnings"] = [*about.get("warnings", ()), words]
        findings = [file.finding(self.baseline) for file in files]
        return Evidence((*headline, *evidence.findings, *findings), about)

    def better(self) -> list[MeasuredFile]:
        """Returns the files that dominate the result, the fastest first."""
        found = [file for file in self.files.values() if file.dominates(self.result)]
        return sorted(found, key=lambda file: -file.speed.value)


def measure_baseline(
    original: nn.Module, form: Format, images: ImageSet, settings: PlanSettings, limit: float
) -> tuple[Baseline, float]:
    """Returns the vendor's file of the unchanged model, and the speed of attnrx's own file relative to it.

    8-bit files are calibrated on a few of the `images`. The log shows the speeds of both files and of eager PyTorch.
    The model without its blocks is also timed, because no plan can be faster than this model.

    Raises:
        NotSupported: `limit` (a share of the baseline's latency) is below the latency of the model without its blocks,
            or the model cannot be written in the format.
    """
    settings = settings.while_planning(family_of(original).costs(original).macs)
    baseline = Baseline.as_file(original, form, images, settings.log, settings.in_subprocess)
    timed = {"eager": Baseline.eager(original).model, UNCHANGED: baseline.unchanged, "empty": baseline.empty}
    timed = {name: model for name, model in timed.items() if model is not None}
    noise = settings.noise(original)
    times = compare_latencies(timed, baseline.model, noise, replace(settings.protocol, warmup=1))
    speeds = {name: each.faster.value for name, each in times.items()}
    threads = times["eager"].threads
    conditions = f"batch {settings.batch}, {threads} thread{'s' * (threads != 1)}"
    milliseconds = 1000 * times["eager"].reference.median
    settings.log(f"faster= counts from {baseline.title}: {milliseconds:.3g} ms ({conditions})")
    unchanged = speeds[UNCHANGED]
    settings.log(f"attnrx's file with nothing removed is {unchanged:.2f}x that, eager PyTorch {speeds['eager']:.2f}x")
    if speeds.get("empty", inf) < 1 / limit:
        raise NotSupported(
            f"faster={1 / limit:.3g} is out of reach: without any block this model is {speeds['empty']:.2f}x as fast "
            f"as {baseline.title}. Request less."
        )
    return baseline, unchanged


def measure_files(  # noqa: PLR0913  (the models, the images, and how files are timed)
    original: nn.Module,
    result: nn.Module | None,
    form: Format,
    calibration: ImageSet,
    tested: ImageSet,
    protocol: LatencyProtocol,
    noise: ImageBatch,
    log: Log,
    baseline: Baseline | None = None,
    *,
    class_names: Sequence[str] = (),
    in_subprocess: bool = False,
) -> FileRun:
    """Exports the original and the `result` to files, and measures the files in the format's runtime.

    The vendor's tool writes the original in float, in the format `form`, and in 8 bits. attnrx writes the original in
    `form` and in 8 bits, and the `result`, if there is one, in `form`. All files are calibrated on the `calibration`
    images, timed in turns on the random images `noise`, and compared by their outputs on the `tested` images.

    A file that cannot be written is left out, and the log says so. An error is raised instead if it is one of attnrx's
    files in `form`. If you pass a `baseline`, its files are reused, except for 8-bit files. If a model has no class
    names, attnrx's files get the `class_names`. With `in_subprocess`, some files are written in another process at the
    same time.

    Raises:
        NotSupported: attnrx cannot write a file in `form`, or the outputs of the result's file differ from the model's.
    """
    tested = tested.take(min(COMPARED_IMAGES, len(tested)))
    drafts = _drafts(original, result, form, calibration, class_names, log)
    known: dict[str, Exported | AttnrxError] = {}
    if baseline is not None and not form.calibrated:  # its 8-bit files are calibrated on a few images, to time them
        known = {title: file for title, file in baseline.files.items() if title in drafts}
    if baseline is not None and baseline.title == UNCHANGED:  # the vendor's tool failed
        drafts.pop(vendor_title(form), None)
    made = known | temporary_files({name: each for name, each in drafts.items() if name not in known}, in_subprocess)
    files = dict[str, Exported]()
    for name, draft in drafts.items():
        if isinstance(file := made[name], Exported):
            files[name] = file
        elif draft.form == form and not draft.by_vendor:
            raise file
        else:
            log(f"not compared with {name}: {file}")
    # Speeds are relative to the vendor's file in the requested precision. If the vendor's tool failed, they are
    # relative to attnrx's file of the unchanged model.
    first = vendor_title(form) if vendor_title(form) in files else UNCHANGED
    log(f"timing {len(files)} files in turns")
    speeds = compare_latencies(files, files[first], noise, protocol, unchanged=files[UNCHANGED])
    measured, found = dict[str, MeasuredFile](), _outputs_of(files, original, tested)
    unit = output_kind_of(original).unit
    for name, file in files.items():
        answers, agreement = found[name], None
        if answers.kind.has_decisions:
            agreement = mean_estimate(answers.agreement("reference", "candidate").double(), 0).scaled(100)
        gain = speeds[name].by_compression
        assert gain is not None
        divergence = mean_estimate(answers.divergence("reference", "candidate").double(), 0)
        speed = Estimate(1.0, 1.0, 1.0) if name == first else speeds[name].faster
        about = speed, gain.value, divergence, unit, len(tested), agreement, file.bytes, speeds[name], file
        measured[name] = MeasuredFile(name, file.form, not drafts[name].by_vendor, *about)
        log(_line(measured[name], first, answers.kind.columns[1]))
    return FileRun(measured, first)


def _outputs_of(files: Mapping[str, Exported], original: nn.Module, images: ImageSet) -> dict[str, Predictions]:
    """Runs the original and all files on the images. Several models run at once, each file on one CPU thread."""
    macs = family_of(original).costs(original).macs
    batch = next((batch for batch in COMPARED_BATCHES if batch * macs <= COMPARED_MACS), 1)
    about: dict[str, Any] = {"batch_size": batch, "device": next(original.parameters()).device}
    available = torch.get_num_threads()

    def run(model: nn.Module, threads: int) -> None:
        with Conditions(threads=threads).held():
            _ = Comparison(model, model, images, **about).outputs  # kept for the comparisons below

    with keeping_outputs(), ThreadPoolExecutor(available) as pool:
        counts = [(original, max(available - len(files), 1)), *((file, 1) for file in files.values())]
        for running in [pool.submit(copy_context().run, run, *each) for each in counts]:
            running.result()
        return {name: Comparison(file, original, images, **about).outputs for name, file in files.items()}


def _line(file: MeasuredFile, baseline: str, noun: str) -> str:
    agreement = "" if file.agreement is None else f"{file.agreement.value:.1f} % of the answers unchanged, "
    speed = f"{file.speed.value:.2f}x of {baseline}"
    return f"{file.title}: {speed}, {agreement}{noun} {file.divergence.value:.3f}, {file.bytes / 1e6:.1f} MB"


def _drafts(
    original: nn.Module,
    result: nn.Module | None,
    form: Format,
    calibration: ImageSet,
    class_names: Sequence[str],
    log: Log,
) -> dict[str, Draft]:
    """Returns a draft (a description of a file to write) for every title, with the vendor's float file first."""
    plain, bits = without_8_bits(form), with_8_bits(form)
    if bits is None and isinstance(form, Onnx | OpenVINO):
        log("not compared with files of 8 bits: pip install 'attnrx[int8]'")
    vendors = dict.fromkeys(filter(None, (plain, form, bits)))
    library = library_subject(original, form, calibration)  # one copy of the model for all its files
    drafts = {vendor_title(each): Draft(library, each, by_vendor=True) for each in vendors}
    drafts[UNCHANGED] = Draft.of(original, form, calibration, class_names)
    if bits is not None and bits != form:
        drafts[f"{UNCHANGED}, int8"] = Draft.of(original, bits, calibration, class_names, is_compared=True)
    if result is not None:
        # If the result's file and its model have different outputs, an error is raised, because the result could not be
        # saved.
        drafts[RESULT] = Draft.of(result, form, calibration, class_names, is_compared=True)
    return drafts
