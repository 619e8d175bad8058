"""One run of the IrrAtt experiment, method by method; an interrupted run continues on the next call."""

import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.api import diagnose, load
from attnrx.checks import Accuracy, Comparison, Fidelity
from attnrx.data import Splits
from attnrx.diagnosis import Diagnosis
from attnrx.evidence import Evidence
from attnrx.progress import Log, no_log
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import write_json
from attnrx.training import Reporter, train
from attnrx_lab.papers.evidence_bench import answering_device, evidence_at
from attnrx_lab.papers.experiment import first_images
from attnrx_lab.papers.irratt_experiment import IrrattExperiment, IrrattRun
from attnrx_lab.papers.irratt_methods import IrrattMethod, paper_price, realized_price
from attnrx_lab.papers.measures import Measure, measures, plain_measure

ANSWERED = 50  # images at a time, for measuring and diagnosing

NOTES = (
    "values and MLP keep what matters most on the calibration images, not the largest singular values of the weights "
    "alone",
    "the query's bias is decomposed with the weights; the paper does not state its treatment",
    "IrrAtt is realized as directions that all heads share, with the strengths of its blocks: the same answers as "
    "those of the form that its CR is counted for, and the realized FLOPs of a CP",
)


def run_irratt(
    experiment: IrrattExperiment, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log
) -> IrrattRun:
    """Computes the costs of every method, and measures those that can be made; every stage is stored and never
    repeated.
    """
    folder = Path(folder)
    experiment.require(folder)
    if (folder / "result.json").exists():
        return IrrattRun.load(folder)
    workshop = _Workshop.of(experiment, folder)
    experiment.claim(folder)
    rules: dict[str, Any] = {}
    outline = experiment.outline()
    for method in experiment.methods:
        rules[method.name] = {"paper": _plain(paper_price(outline, method))}
        if not method.by_training:
            log(f"{experiment.name}: {method.name}")
            rules[method.name] |= _measured(workshop, method, reporter)
    notes = [*workshop.splits.notes, *NOTES]
    notes += ["ranks from training with constraints (Eq. 7) are priced and not measured"] * any(
        method.by_training for method in experiment.methods
    )
    record = {
        "kind": IrrattRun.kind,
        "schema": IrrattRun.schema,
        "settings": to_dict(experiment),
        "data": {"name": workshop.splits.name, "test": workshop.comparison.data.fingerprint, "notes": notes},
        "model": {"fingerprint": workshop.diagnosis.fingerprint},
        "rules": rules,
        "measured_with": {"device": str(workshop.comparison.device), "threads": torch.get_num_threads()},
    }
    write_json(folder / "result.json", record)
    log(f"{experiment.name}: done, {folder / 'result.json'}")
    return IrrattRun.load(folder)


@dataclass(frozen=True, eq=False)
class _Workshop:
    """The model, data and settings shared by all methods."""

    experiment: IrrattExperiment
    folder: Path
    model: nn.Module
    splits: Splits
    diagnosis: Diagnosis
    comparison: Comparison

    @classmethod
    def of(cls, experiment: IrrattExperiment, folder: Path) -> "_Workshop":
        """Loads, and diagnoses on the calibration images; candidates are made on the CPU."""
        model, device = experiment.original(), answering_device()
        splits = experiment.splits(model)
        calibration = first_images(splits.train, experiment.calibration_images)
        diagnosis = diagnose(model, calibration, batch_size=ANSWERED, seed=experiment.seed)
        test = first_images(splits.test, experiment.test_images)
        reference = model if device.type == "cpu" else copy.deepcopy(model).to(device)
        comparison = Comparison(
            reference, reference, test, seed=experiment.seed, device=device, diagnosis=diagnosis, batch_size=ANSWERED
        )
        return cls(experiment, folder, model, splits, diagnosis, comparison)

    def candidate(self, method: IrrattMethod, reporter: Reporter | None) -> nn.Module:
        """Makes the model of a method, and fine-tunes it if requested; the original is never trained."""
        own = self.experiment
        made = method.candidate(self.model, self.diagnosis, own.metric, own.seed)
        if not own.epochs or not method.changes:
            return made
        trained = train(made, self.splits, own.training(), self.folder / "train" / method.name, reporter=reporter)
        return load(trained.folder)

    def evidence(self, method: IrrattMethod, reporter: Reporter | None) -> Evidence:
        """Returns accuracy and fidelity of a method's model against the original, and its realized costs."""
        candidate = self.candidate(method, reporter)
        placed = candidate.to(self.comparison.device) if method.changes else self.comparison.reference
        compared = replace(self.comparison, candidate=placed)
        about = {
            "experiment": to_dict(self.experiment),
            "method": to_dict(method),
            "realized": realized_price(self.model, candidate),
            "reference": self.diagnosis.fingerprint,
            "data": compared.data.fingerprint,
            "images": len(compared.data),
        }
        return Evidence((*Accuracy(most_drop=None)(compared), *Fidelity()(compared)), about)


def _measured(workshop: _Workshop, method: IrrattMethod, reporter: Reporter | None) -> dict[str, Any]:
    path = workshop.folder / "evidence" / f"{method.name}.json"
    evidence = evidence_at(path, partial(workshop.evidence, method, reporter))
    return {"measured": measures(evidence), "realized": _plain(evidence.about["realized"])}


def _plain(numbers: dict[str, float]) -> dict[str, Measure]:
    return {name: plain_measure(value) for name, value in numbers.items()}
