"""The bench: one trained model with its diagnosis, on which every prescription is realized, measured and controlled."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from attnrx.api import control_prescriptions, realize
from attnrx.checks import Accuracy, Bounds, Check, Comparison, Controls, Costs, Fidelity
from attnrx.config import to_dict
from attnrx.data import ImageSet, Splits
from attnrx.diagnosis import Diagnosis
from attnrx.evidence import Evidence
from attnrx.prescription import Prescription
from attnrx_lab.papers.experiment import first_images
from attnrx_lab.papers.svda_experiment import SvdaExperiment


def realized(model: nn.Module, prescription: Prescription, kind: str, calibration: ImageSet) -> nn.Module:
    """Realizes a prescription in the way `kind` names: "mask", or one of the compressions."""
    if kind == "mask":
        return realize(model, prescription, by="mask")
    return realize(model, prescription, by="compress", norms=kind, calibration=calibration)


def answering_device() -> torch.device:
    """Where the test images are answered: on an accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, eq=False)
class Bench:
    """Measures candidates against one model; what a model once answered is kept, so it answers each image only once."""

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    comparison: Comparison
    experiment: SvdaExperiment

    @classmethod
    def of(cls, model: nn.Module, diagnosis: Diagnosis, splits: Splits, experiment: SvdaExperiment) -> "Bench":
        """Sets up the bench; prescriptions are realized on the CPU, and answer where it is fastest."""
        device = answering_device()
        test = first_images(splits.test, experiment.test_images)
        reference = model if device.type == "cpu" else copy.deepcopy(model).to(device)
        comparison = Comparison(reference, reference, test, seed=experiment.seed, device=device, diagnosis=diagnosis)
        return cls(model, diagnosis, first_images(splits.train, experiment.calibration_images), comparison, experiment)

    def stages(self, prescription: Prescription) -> Iterator[tuple[str, Callable[[], Evidence]]]:
        """Names the pieces of evidence about one prescription, each with what makes it."""
        masked = _Once(lambda: self._realized(prescription, "mask"))
        for kind in self.experiment.kinds:
            yield kind, lambda kind=kind: self.measured(prescription, kind, masked())
        for kind in self.experiment.control_kinds:
            yield f"controls-{kind}", lambda kind=kind: self.controlled(prescription, kind)

    def measured(self, prescription: Prescription, kind: str, masked: nn.Module) -> Evidence:
        """Accuracy, fidelity and costs of one realization; for the mask, whose theorems they are, the bounds too."""
        candidate = masked if kind == "mask" else self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, masked=masked, prescription=prescription)
        checks: list[Check] = [Accuracy(most_drop=None), Fidelity(), Costs()]
        if kind == "mask":
            checks.append(Bounds(images=self.experiment.bound_images))
        return self._evidence(checks, comparison, kind)

    def controlled(self, prescription: Prescription, kind: str) -> Evidence:
        """The candidate against matched controls that are realized in the same way.

        The uniform control is left out where the prescription itself gives every head the same rank: they are equal.
        """
        even = len({rank for layer in prescription.ranks for rank in layer}) == 1
        kinds = ("random", "largest") if even else ("random", "largest", "uniform")
        own = self.experiment
        prescriptions = control_prescriptions(self.diagnosis, prescription, kinds, own.draws, own.seed)
        controls = Controls(prescriptions, lambda control: self._realized(control, kind))
        candidate = self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, prescription=prescription)
        return self._evidence([controls], comparison.taking(own.control_images), kind)

    def _realized(self, prescription: Prescription, kind: str) -> nn.Module:
        return realized(self.model, prescription, kind, self.calibration).to(self.comparison.device)

    def _evidence(self, checks: list[Check], comparison: Comparison, kind: str) -> Evidence:
        findings = tuple(finding for check in checks for finding in check(comparison))
        about = {
            "experiment": to_dict(self.experiment),
            "realization": kind,
            "reference": self.diagnosis.fingerprint,
            "data": comparison.data.fingerprint,
            "images": len(comparison.data),
        }
        return Evidence(findings, about)


class _Once:
    """Makes something on first use, and keeps it."""

    def __init__(self, make: Callable[[], nn.Module]):
        self._make = make
        self._made: nn.Module | None = None

    def __call__(self) -> nn.Module:
        if self._made is None:
            self._made = self._make()
        return self._made


def evidence_at(path: Path, make: Callable[[], Evidence]) -> Evidence:
    """Reads evidence that is there, or makes and saves it."""
    if path.exists():
        return Evidence.load(path)
    evidence = make()
    evidence.save(path)
    return evidence
