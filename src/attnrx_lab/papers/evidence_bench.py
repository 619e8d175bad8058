"""The evidence bench: one trained model with its diagnosis, on which prescriptions are realized, measured and
controlled.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from attnrx.api import control_prescriptions, realize
from attnrx.checks import Accuracy, Bounds, Check, Comparison, Controls, Costs, Fidelity
from attnrx.data import ImageSet, Splits
from attnrx.diagnosis import Diagnosis
from attnrx.evidence import Evidence
from attnrx.prescription import Prescription
from attnrx.serialization.config import to_dict
from attnrx_lab.papers.experiment import first_images
from attnrx_lab.papers.svda_experiment import SvdaExperiment


def realized(model: nn.Module, prescription: Prescription, kind: str, calibration: ImageSet) -> nn.Module:
    """Realizes a prescription by `kind`: "mask", or one of the compressions."""
    if kind == "mask":
        return realize(model, prescription, by="mask")
    return realize(model, prescription, by="compress", norms=kind, calibration=calibration)


def answering_device() -> torch.device:
    """Returns the device for the test images: an accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, eq=False)
class EvidenceBench:
    """Measures candidates against one model; its predictions are cached, so it classifies each image only once."""

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    comparison: Comparison
    experiment: SvdaExperiment

    @classmethod
    def of(cls, model: nn.Module, diagnosis: Diagnosis, splits: Splits, experiment: SvdaExperiment) -> "EvidenceBench":
        """Prepares the bench; prescriptions are realized on the CPU and run on the fastest device."""
        device = answering_device()
        test = first_images(splits.test, experiment.test_images)
        reference = model if device.type == "cpu" else copy.deepcopy(model).to(device)
        comparison = Comparison(reference, reference, test, seed=experiment.seed, device=device, diagnosis=diagnosis)
        return cls(model, diagnosis, first_images(splits.train, experiment.calibration_images), comparison, experiment)

    def stages(self, prescription: Prescription) -> Iterator[tuple[str, Callable[[], Evidence]]]:
        """Returns the pieces of evidence about one prescription by name, each with the function that computes it."""
        masked = _Once(lambda: self._realized(prescription, "mask"))
        for kind in self.experiment.kinds:
            yield kind, lambda kind=kind: self.measured(prescription, kind, masked())
        for kind in self.experiment.control_kinds:
            yield f"controls-{kind}", lambda kind=kind: self.controlled(prescription, kind)

    def measured(self, prescription: Prescription, kind: str, masked: nn.Module) -> Evidence:
        """Returns accuracy, fidelity and costs of one realization; for the mask also the bounds of the theorems."""
        candidate = masked if kind == "mask" else self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, masked=masked, prescription=prescription)
        checks: list[Check] = [Accuracy(most_drop=None), Fidelity(), Costs()]
        if kind == "mask":
            checks.append(Bounds(images=self.experiment.bound_images))
        return self._evidence(checks, comparison, kind)

    def controlled(self, prescription: Prescription, kind: str) -> Evidence:
        """Compares the candidate with matched controls that are realized in the same way.

        The uniform control is skipped if the prescription itself gives every head the same rank: they are equal.
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
    """Computes a value on first use, and caches it."""

    def __init__(self, make: Callable[[], nn.Module]):
        self._make = make
        self._made: nn.Module | None = None

    def __call__(self) -> nn.Module:
        if self._made is None:
            self._made = self._make()
        return self._made


def evidence_at(path: Path, make: Callable[[], Evidence]) -> Evidence:
    """Reads existing evidence, or computes and saves it."""
    if path.exists():
        return Evidence.load(path)
    evidence = make()
    evidence.save(path)
    return evidence
