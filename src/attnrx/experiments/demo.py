"""The demonstration: the whole way on one dataset, from training to a report, in minutes on two cores."""

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.checks import Accuracy, Bounds, Calibration, Controls, Costs, Fidelity, Latency, Robustness
from attnrx.costs import LatencyProtocol
from attnrx.data import ImageSet, Splits, load_data
from attnrx.diagnosis import Diagnosis
from attnrx.errors import NothingChanged
from attnrx.evidence import Evidence, Finding
from attnrx.experiments.bench import Say, in_silence, realized
from attnrx.experiments.experiment import KINDS
from attnrx.experiments.measures import measures
from attnrx.experiments.short_training import ShortTraining, short_training, small_model
from attnrx.flow import control_prescriptions, diagnose, prescribe, save, train, verify
from attnrx.prescription import Prescription
from attnrx.reports import AttentionSamples, ReportContent, TradeOffPoint, sample_attention, write_report
from attnrx.rules import EnergyRetention
from attnrx.training import Reporter, TrainingRun

RHO = 0.90
RHOS = (0.99, 0.95, 0.90, 0.80, 0.65, 0.50)
DRAWS = 10
TEST_IMAGES = 2000  # at most; CALIBRATION and DIAGNOSED likewise
CALIBRATION = 512
DIAGNOSED = 256
SAMPLES = 6

MOST_DROP = 3.0  # points of accuracy that the interval may reach down to
LEAST_AGREEMENT = 95.0  # % of the test images
EXACT = 1e-4  # float32 logits of the exact compression and of the mask, relative

# Mathematics, not measurements: where one of these fails, attnrx is wrong.
LAWS = ("bounds", "exactness", "costs")


@dataclass(frozen=True)
class DemoRow:
    """One realization in the summary: what it saves, in %, and how far it is from the original."""

    kind: str
    params_down: float
    macs_down: float
    discrepancy: float
    agreement: float
    accuracy_change: float
    low: float
    high: float


@dataclass(frozen=True)
class DemoResult:
    """Where everything lies, and what it says. `laws_hold` speaks of mathematics, `evidence.holds` of every claim."""

    folder: Path
    report: Path
    evidence_path: Path
    model: Path
    evidence: Evidence
    removed_share: float
    accuracy: float
    rows: tuple[DemoRow, ...]
    seconds: float

    @property
    def broken_laws(self) -> tuple[Finding, ...]:
        """Findings that no noise explains."""
        return tuple(finding for finding in self.evidence.failures if finding.check in LAWS)

    @property
    def laws_hold(self) -> bool:
        """Whether every bound, every closed form and the equality of exact compression and mask hold."""
        return not self.broken_laws


def demo(
    data: str | Path | Splits = "digits",
    folder: Path | str = "runs/demo",
    *,
    epochs: int | None = None,
    seed: int = 42,
    reporter: Reporter | None = None,
    say: Say = in_silence,
) -> DemoResult:
    """Trains a small SVDA-ViT, diagnoses, prescribes, realizes in every way, verifies, saves and reports.

    The candidate that is saved is the refit compression at rho = 0.90. A finished training in the folder is used
    again. Progress goes to `say` and to the training `reporter`.
    """
    began, folder = time.perf_counter(), Path(folder)
    stage = _Stages(say, total=7)
    stage("loading the data")
    splits = data if isinstance(data, Splits) else load_data(data)
    short = short_training(splits)
    name, model = small_model(splits, seed)
    stage(f"training {name} on {len(splits.train):,} images of {splits.name}")
    place = folder / "train" / splits.name.replace("/", "-")
    trained = train(model, splits, short.config(splits, seed, epochs), place, reporter=reporter)
    stage("diagnosing")
    subject = _Subject.of(trained, splits, seed)
    subject.diagnosis.save(folder / "diagnosis.json")
    stage("prescribing and realizing over rho")
    points, rows = subject.trade_off(RHOS)
    stage("verifying the refit compression against controls, bounds and spoilt images")
    about = {"model": name, "training": short.told, "epochs": len(trained.history)}
    evidence = subject.verified(about)
    stage("saving")
    model_folder = save(subject.candidate, folder / "model", prescription=subject.prescription, evidence=evidence)
    subject.prescription.save(folder / "prescription.json")
    evidence_path = evidence.save(folder / "evidence.json")
    stage("writing the report")
    content = subject.content(evidence, points, trained, {**about, **_versions(splits, seed, short)})
    return DemoResult(
        folder=folder,
        report=write_report(folder / "report.html", content),
        evidence_path=evidence_path,
        model=model_folder,
        evidence=evidence,
        removed_share=subject.prescription.removed_share,
        accuracy=_value(evidence, "original_accuracy"),
        rows=rows,
        seconds=time.perf_counter() - began,
    )


class _Stages:
    """Says which of how many stages begins."""

    def __init__(self, say: Say, total: int):
        self._say, self._total, self._number = say, total, 0

    def __call__(self, what: str) -> None:
        self._number += 1
        self._say(f"[{self._number}/{self._total}] {what}")


@dataclass(frozen=True, eq=False)
class _Subject:
    """The trained model with everything that is made of it at rho = 0.90."""

    model: nn.Module
    splits: Splits
    test: ImageSet
    calibration: ImageSet
    diagnosis: Diagnosis
    prescription: Prescription
    realizations: Mapping[str, nn.Module]
    seed: int

    @classmethod
    def of(cls, trained: TrainingRun, splits: Splits, seed: int) -> "_Subject":
        model = trained.model.to("cpu")
        calibration, test = _most(splits.train, CALIBRATION), _most(splits.test, TEST_IMAGES)
        diagnosis = diagnose(model, _most(splits.validation, DIAGNOSED), seed=seed)
        prescription = prescribe(diagnosis, EnergyRetention(RHO))
        realizations = {kind: realized(model, prescription, kind, calibration) for kind in KINDS}
        return cls(model, splits, test, calibration, diagnosis, prescription, realizations, seed)

    @property
    def candidate(self) -> nn.Module:
        return self.realizations["refit"]

    def trade_off(self, rhos: Sequence[float]) -> tuple[tuple[TradeOffPoint, ...], tuple[DemoRow, ...]]:
        """Every realization at every rho where the rule has anything to do; the rows are those at rho = 0.90."""
        points: list[TradeOffPoint] = []
        rows: list[DemoRow] = []
        for rho in rhos:
            try:
                prescription = prescribe(self.diagnosis, EnergyRetention(rho))
            except NothingChanged:
                continue
            for kind in KINDS:
                candidate = self._realized(prescription, kind)
                found = verify(candidate, self.model, self.test, (Accuracy(None), Fidelity(), Costs()), seed=self.seed)
                points.append(_point(rho, kind, prescription, found))
                rows += [_row(kind, found)] if rho == RHO else []
        return tuple(points), tuple(rows)

    def verified(self, about: Mapping[str, Any]) -> Evidence:
        """The evidence about the candidate, with the two claims that speak of several realizations."""
        masked = self.realizations["mask"]
        controls = control_prescriptions(self.diagnosis, self.prescription, draws=DRAWS, seed=self.seed)
        checks = (
            Accuracy(most_drop=MOST_DROP),
            Fidelity(least_agreement=LEAST_AGREEMENT),
            Costs(),
            Bounds(),
            Controls(controls, lambda control: self._realized(control, "refit")),
            Latency(protocol=LatencyProtocol(rounds=20)),
            Calibration(),
            Robustness(images=500),
        )
        evidence = verify(
            self.candidate,
            self.model,
            self.test,
            checks,
            about,
            masked=masked,
            prescription=self.prescription,
            diagnosis=self.diagnosis,
            seed=self.seed,
        )
        return replace(evidence, findings=(*evidence.findings, self._exactness(), self._refit_helps()))

    def _exactness(self) -> Finding:
        """The master law, mask == compress, on the test images."""
        found = self._distance("exact", self.realizations["mask"])
        claim = "the exact compression answers as the mask does, to the rounding of float32"
        return replace(found, check="exactness", claim=claim, limit=EXACT, holds=found.value <= EXACT)

    def _refit_helps(self) -> Finding:
        refit, renormalized = (self._distance(kind, self.model).value for kind in ("refit", "renormalized"))
        ratio = refit / renormalized if renormalized else 1.0
        claim = "refit is no farther from the original than renormalized, at the same cost"
        details = {"quantity": "discrepancy ratio", "refit": refit, "renormalized": renormalized}
        return Finding("refit", claim, ratio, "x", limit=1.0, holds=ratio <= 1.0, n=len(self.test), details=details)

    def _distance(self, kind: str, reference: nn.Module) -> Finding:
        found = verify(self.realizations[kind], reference, self.test, (Fidelity(),), seed=self.seed)
        return next(finding for finding in found.findings if finding.details["quantity"] == "discrepancy")

    def _realized(self, prescription: Prescription, kind: str) -> nn.Module:
        return realized(self.model, prescription, kind, self.calibration)

    def content(
        self, evidence: Evidence, points: tuple[TradeOffPoint, ...], trained: TrainingRun, about: Mapping[str, Any]
    ) -> ReportContent:
        """Everything that the report shows."""
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
        batch = next(iter(self.test.take(min(SAMPLES, len(self.test))).batches(SAMPLES)))
        models = {"original": self.model, "masked": self.realizations["mask"], "compressed": self.candidate}
        labels = tuple(self.splits.class_names[label] for label in batch.labels.tolist())
        return sample_attention(models, batch.images, labels)


def _most(images: ImageSet, count: int) -> ImageSet:
    return images if len(images) <= count else images.take(count)


def _point(rho: float, kind: str, prescription: Prescription, evidence: Evidence) -> TradeOffPoint:
    found = measures(evidence)
    change, discrepancy = found["accuracy_change"], found["discrepancy_to_original"]
    return TradeOffPoint(
        rho=rho,
        kind=kind,
        removed_share=prescription.removed_share,
        discrepancy=discrepancy["value"],
        accuracy_change=change["value"],
        accuracy_interval=(change["low"], change["high"]),
        discrepancy_interval=(discrepancy["low"], discrepancy["high"]),
    )


def _row(kind: str, evidence: Evidence) -> DemoRow:
    found = measures(evidence)
    change = found["accuracy_change"]
    return DemoRow(
        kind=kind,
        params_down=found["params_down"]["value"],
        macs_down=found["macs_down"]["value"],
        discrepancy=found["discrepancy_to_original"]["value"],
        agreement=found["agreement_to_original"]["value"],
        accuracy_change=change["value"],
        low=change["low"],
        high=change["high"],
    )


def _value(evidence: Evidence, name: str) -> float:
    return measures(evidence)[name]["value"]


def _versions(splits: Splits, seed: int, short: ShortTraining) -> dict[str, Any]:
    return {
        "data": splits.name,
        "classes": len(splits.class_names),
        "batch size": short.batch_size,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("attnrx", "torch")},
        "notes": list(splits.notes),
    }
