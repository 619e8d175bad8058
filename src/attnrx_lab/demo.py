"""The demonstration: the whole way on one dataset, from training to a report, in minutes on two cores."""

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.api import control_prescriptions, diagnose, load, prescribe, save, verify
from attnrx.checks import Accuracy, Bounds, Calibration, Comparison, Controls, Costs, Fidelity, Latency
from attnrx.costs import LatencyProtocol
from attnrx.data import ImageSet, Splits, load_data
from attnrx.diagnosis import Diagnosis
from attnrx.errors import NoOpPrescription
from attnrx.evidence import Evidence, Finding, judged
from attnrx.models import SCENARIOS, build_model
from attnrx.prescription import Prescription
from attnrx.progress import Log, no_log
from attnrx.reports import AttentionSamples, ReportContent, TradeOffPoint, sample_attention, write_report
from attnrx.rules import EnergyRetention
from attnrx.training import Reporter, TrainingConfig, TrainingRun, train
from attnrx_lab.checks import Robustness
from attnrx_lab.papers.experiment import measures
from attnrx_lab.papers.svda import KINDS, realized

STEPS = 400  # of a dataset other than the digits, in whole epochs
MOST_PATCH = 16

RHO = 0.90
RHOS = (0.99, 0.95, 0.90, 0.80, 0.65, 0.50)
DRAWS = 10
TEST_IMAGES = 2000  # at most; CALIBRATION and DIAGNOSED likewise
CALIBRATION = 512
DIAGNOSED = 256
SAMPLES = 6

MOST_DROP = 3.0  # the limit of the lower end of the interval, in points of accuracy
LEAST_AGREEMENT = 95.0  # % of the test images
EXACT = 1e-4  # float32 logits of the exact compression and of the mask, relative


# Of the strengths. With a start of 1 and the common rate they would hardly spread in so few steps: every rule would
# remove what energy retention removes of equal strengths, and attention would be almost uniform.
START, FACTOR = 4.0, 20.0
DESCRIPTION = (
    f"a short training made to show something: strengths start at {START:g} and learn {FACTOR:g} times faster than the "
    "other weights, so that they spread; the SVDA paper trains for many more epochs, and does not state how its "
    "strengths start"
)


def short_training(splits: Splits, seed: int, epochs: int | None = None) -> TrainingConfig:
    """Returns the training of a dataset for a demonstration, of this many epochs if requested."""
    digits = splits.name == "digits"
    batch = min(32 if digits else 128, len(splits.train))
    usual = 30 if digits else max(1, round(STEPS / (len(splits.train) // batch)))
    return TrainingConfig(
        epochs=epochs or usual,
        batch_size=batch,
        learning_rate=2e-3 if digits else 1e-3,
        strength_init=START,
        strength_learning_rate=FACTOR,
        precision="fp32" if digits else "bf16",
        seed=seed,
        checkpoint_every=100,
    )


def small_model(splits: Splits, seed: int) -> tuple[str, nn.Module]:
    """Returns the name and the model for a dataset: its own scenario, else the compact one of its shape."""
    scale = {"mean": splits.normalization.mean, "std": splits.normalization.std}
    shape = {"channels": splits.channels, "classes": len(splits.class_names), "image_size": splits.image_size}
    if splits.name in SCENARIOS and SCENARIOS[splits.name].get("image_size", 32) == splits.image_size:
        name = f"svda:{splits.name}"
    else:
        name, shape["patch_size"] = "svda:cifar10", patch_size(splits.image_size)
    return name, build_model(name, seed=seed, **scale, **shape)


def patch_size(side: int) -> int:
    """Returns the divisor of the side that is nearest to an eighth of it, and to 16 for large images."""
    wanted = min(side / 8, MOST_PATCH)
    return min((size for size in range(1, side + 1) if side % size == 0), key=lambda size: abs(size - wanted))


@dataclass(frozen=True)
class DemoRow:
    """One realization in the summary: its saving in %, and its distance from the original."""

    kind: str
    params_down: float
    macs_down: float
    discrepancy: float
    agreement: float
    accuracy_change: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Subject:
    """The trained model and its compressions at rho = 0.90."""

    model: nn.Module
    splits: Splits
    calibration: ImageSet
    diagnosis: Diagnosis
    prescription: Prescription
    realizations: Mapping[str, nn.Module]
    comparison: Comparison

    @classmethod
    def of(cls, model: nn.Module, splits: Splits, seed: int) -> "Subject":
        """Diagnoses the model on validation images, prescribes, and realizes in every way."""
        calibration, test = _most(splits.train, CALIBRATION), _most(splits.test, TEST_IMAGES)
        diagnosis = diagnose(model, _most(splits.validation, DIAGNOSED), seed=seed)
        prescription = prescribe(diagnosis, EnergyRetention(RHO))
        realizations = {kind: realized(model, prescription, kind, calibration) for kind in KINDS}
        comparison = Comparison(model, model, test, seed=seed)  # caches the predictions of the original
        return cls(model, splits, calibration, diagnosis, prescription, realizations, comparison)

    @property
    def candidate(self) -> nn.Module:
        return self.realizations["refit"]

    def trade_off(self, rhos: Sequence[float]) -> tuple[tuple[TradeOffPoint, ...], tuple[DemoRow, ...]]:
        """Every realization at every rho at which the rule removes something; the rows are those at rho = 0.90."""
        points: list[TradeOffPoint] = []
        rows: list[DemoRow] = []
        for rho in rhos:
            try:
                prescription = prescribe(self.diagnosis, EnergyRetention(rho))
            except NoOpPrescription:
                continue
            for kind in KINDS:
                compared = replace(self.comparison, candidate=self._realized(prescription, kind))
                found = measures(Evidence((*Accuracy(None)(compared), *Fidelity()(compared), *Costs()(compared)), {}))
                change, discrepancy = found["accuracy_change"], found["discrepancy_to_original"]
                point = TradeOffPoint(
                    rho=rho,
                    kind=kind,
                    removed_share=prescription.removed_share,
                    discrepancy=discrepancy["value"],
                    accuracy_change=change["value"],
                    accuracy_interval=(change["low"], change["high"]),
                    discrepancy_interval=(discrepancy["low"], discrepancy["high"]),
                )
                points.append(point)
                if rho == RHO:
                    names = ("params_down", "macs_down", "discrepancy_to_original", "agreement_to_original")
                    values = [found[name]["value"] for name in names]
                    rows.append(DemoRow(kind, *values, *(change[end] for end in ("value", "low", "high"))))
        return tuple(points), tuple(rows)

    def verified(self, about: Mapping[str, Any]) -> Evidence:
        """The evidence about the candidate, with the two claims about several realizations."""
        masked = self.realizations["mask"]
        controls = control_prescriptions(self.diagnosis, self.prescription, draws=DRAWS, seed=self.comparison.seed)
        checks = (
            Accuracy(most_drop=MOST_DROP),
            Fidelity(least_agreement=LEAST_AGREEMENT),
            Costs(),
            Bounds(),
            Controls(controls, lambda control: self._realized(control, "refit")),
            Latency(protocol=LatencyProtocol(rounds=20)),  # the demonstration ends in minutes
            Calibration(),
            Robustness(images=500),
        )
        evidence = verify(
            self.candidate,
            self.model,
            self.comparison.data,
            checks,
            about,
            masked=masked,
            prescription=self.prescription,
            diagnosis=self.diagnosis,
            seed=self.comparison.seed,
        )
        return replace(evidence, findings=(*evidence.findings, self._exactness(), self._refit_helps()))

    def _exactness(self) -> Finding:
        """The master law, mask == compress, on the test images."""
        found = self._distance("exact", self.realizations["mask"])
        claim = "the exact compression answers as the mask does, to the rounding of float32"
        outcome = judged(found.value, EXACT, (found.low, found.high), found.n, at_least=False)
        return replace(found, check="exactness", claim=claim, **outcome)

    def _refit_helps(self) -> Finding:
        refit, renormalized = (self._distance(kind, self.model).value for kind in ("refit", "renormalized"))
        ratio = refit / renormalized if renormalized else 1.0
        claim = "refit is no farther from the original than renormalized, at the same cost"
        details = {"quantity": "discrepancy ratio", "refit": refit, "renormalized": renormalized}
        outcome = judged(ratio, 1.0, n=len(self.comparison.data), at_least=False)
        return Finding("refit", claim, ratio, "x", **outcome, details=details)

    def _distance(self, kind: str, reference: nn.Module) -> Finding:
        compared = replace(self.comparison, candidate=self.realizations[kind], reference=reference)
        return next(finding for finding in Fidelity()(compared) if finding.details["quantity"] == "discrepancy")

    def _realized(self, prescription: Prescription, kind: str) -> nn.Module:
        return realized(self.model, prescription, kind, self.calibration)

    def content(
        self, evidence: Evidence, points: tuple[TradeOffPoint, ...], trained: TrainingRun, about: Mapping[str, Any]
    ) -> ReportContent:
        return ReportContent(
            title=f"{self.splits.name}: energy retention at rho = {RHO:.2f}, refit",
            about=about,
            prescription=self.prescription,
            diagnosis=self.diagnosis,
            evidence=evidence,
            trade_off=points,
            attention=self._samples(),
            history=trained.history,
        )

    def _samples(self) -> AttentionSamples:
        batch = next(iter(self.comparison.data.take(min(SAMPLES, len(self.comparison.data))).batches(SAMPLES)))
        models = {"original": self.model, "masked": self.realizations["mask"], "compressed": self.candidate}
        labels = tuple(self.splits.class_names[label] for label in batch.labels.tolist())
        return sample_attention(models, batch.images, labels)


def _most(images: ImageSet, count: int) -> ImageSet:
    return images if len(images) <= count else images.take(count)


@dataclass(frozen=True)
class DemoResult:
    """The folder, the files in it, the evidence and the headline numbers of one run."""

    folder: Path
    report: Path
    evidence_path: Path
    model: Path
    evidence: Evidence
    removed_share: float
    accuracy: float
    rows: tuple[DemoRow, ...]
    seconds: float


def demo(
    data: str | Path | Splits = "digits",
    folder: Path | str = "runs/demo",
    *,
    epochs: int | None = None,
    seed: int = 42,
    reporter: Reporter | None = None,
    log: Log = no_log,
) -> DemoResult:
    """Trains a small SVDA-ViT, diagnoses, prescribes, realizes in every way, verifies, saves and reports.

    The candidate that is saved is the refit compression at rho = 0.90. A finished training in the folder is used
    again. Progress goes to `log` and to the training `reporter`.
    """
    began, folder = time.perf_counter(), Path(folder)
    done = count(1)

    def stage(what: str) -> None:
        log(f"[{next(done)}/7] {what}")

    stage("loading the data")
    splits = data if isinstance(data, Splits) else load_data(data)
    training = short_training(splits, seed, epochs)
    name, model = small_model(splits, seed)
    stage(f"training {name} on {len(splits.train):,} images of {splits.name}")
    place = folder / "train" / splits.name.replace("/", "-")
    trained = train(model, splits, training, place, reporter=reporter)
    stage("diagnosing")
    subject = Subject.of(load(place), splits, seed)  # as it was saved: on the CPU
    subject.diagnosis.save(folder / "diagnosis.json")
    stage("prescribing and realizing over rho")
    points, rows = subject.trade_off(RHOS)
    stage("verifying the refit compression against controls, bounds and corrupted images")
    about: dict[str, Any] = {"model": name, "training": DESCRIPTION, "epochs": len(trained.history)}
    evidence = subject.verified(about)
    stage("saving")
    model_folder = save(subject.candidate, folder / "model", prescription=subject.prescription, evidence=evidence)
    subject.prescription.save(folder / "prescription.json")
    evidence_path = evidence.save(folder / "evidence.json")
    stage("writing the report")
    about |= {
        "data": splits.name,
        "classes": len(splits.class_names),
        "batch size": training.batch_size,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("attnrx", "torch")},
        "notes": list(splits.notes),
    }
    content = subject.content(evidence, points, trained, about)
    return DemoResult(
        folder=folder,
        report=write_report(folder / "report.html", content),
        evidence_path=evidence_path,
        model=model_folder,
        evidence=evidence,
        removed_share=subject.prescription.removed_share,
        accuracy=measures(evidence)["original_accuracy"]["value"],
        rows=rows,
        seconds=time.perf_counter() - began,
    )
