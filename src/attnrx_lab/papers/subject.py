"""The demonstration's model with its prescription, its candidates and its evidence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from attnrx.api import control_prescriptions, diagnose, prescribe, verify
from attnrx.checks import Accuracy, Bounds, Calibration, Comparison, Controls, Costs, Fidelity, Latency
from attnrx.costs import LatencyProtocol
from attnrx.data import ImageSet, Splits
from attnrx.diagnosis import Diagnosis
from attnrx.errors import NoOpPrescription
from attnrx.evidence import Evidence, Finding, judged
from attnrx.prescription import Prescription
from attnrx.reports import AttentionSamples, ReportContent, TradeOffPoint, sample_attention
from attnrx.rules import EnergyRetention
from attnrx.training import TrainingRun
from attnrx_lab.checks import Robustness
from attnrx_lab.papers.evidence_bench import realized
from attnrx_lab.papers.measures import Measure, measures
from attnrx_lab.papers.svda_experiment import KINDS

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
        """The model that is verified and saved."""
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
                points.append(_point(rho, kind, prescription, found))
                rows += [_row(kind, found)] if rho == RHO else []
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
            Latency(protocol=LatencyProtocol(rounds=20)),
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
        return replace(
            found,
            check="exactness",
            claim=claim,
            **judged(found.value, EXACT, (found.low, found.high), found.n, at_least=False),
        )

    def _refit_helps(self) -> Finding:
        refit, renormalized = (self._distance(kind, self.model).value for kind in ("refit", "renormalized"))
        ratio = refit / renormalized if renormalized else 1.0
        claim = "refit is no farther from the original than renormalized, at the same cost"
        details = {"quantity": "discrepancy ratio", "refit": refit, "renormalized": renormalized}
        return Finding(
            "refit",
            claim,
            ratio,
            "x",
            **judged(ratio, 1.0, n=len(self.comparison.data), at_least=False),
            details=details,
        )

    def _distance(self, kind: str, reference: nn.Module) -> Finding:
        compared = replace(self.comparison, candidate=self.realizations[kind], reference=reference)
        return next(finding for finding in Fidelity()(compared) if finding.details["quantity"] == "discrepancy")

    def _realized(self, prescription: Prescription, kind: str) -> nn.Module:
        return realized(self.model, prescription, kind, self.calibration)

    def content(
        self, evidence: Evidence, points: tuple[TradeOffPoint, ...], trained: TrainingRun, about: Mapping[str, Any]
    ) -> ReportContent:
        """The content of the report."""
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


def _point(rho: float, kind: str, prescription: Prescription, found: Mapping[str, Measure]) -> TradeOffPoint:
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


def _row(kind: str, found: Mapping[str, Measure]) -> DemoRow:
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
