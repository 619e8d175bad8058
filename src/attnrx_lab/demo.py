"""The demonstration: the whole way on one dataset, from training to a report, in minutes on two cores."""

import importlib.metadata
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.api import load, save
from attnrx.data import Splits, load_data
from attnrx.evidence import Evidence
from attnrx.progress import Log, no_log
from attnrx.reports import write_report
from attnrx.training import Reporter, train
from attnrx_lab.papers.measures import measures
from attnrx_lab.papers.short_training import ShortTraining, short_training, small_model
from attnrx_lab.papers.subject import RHOS, DemoRow, Subject


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
    stage = _Stages(log, total=7)
    stage("loading the data")
    splits = data if isinstance(data, Splits) else load_data(data)
    short = short_training(splits)
    name, model = small_model(splits, seed)
    stage(f"training {name} on {len(splits.train):,} images of {splits.name}")
    place = folder / "train" / splits.name.replace("/", "-")
    trained = train(model, splits, short.config(splits, seed, epochs), place, reporter=reporter)
    stage("diagnosing")
    subject = Subject.of(load(place), splits, seed)  # as it was saved: on the CPU
    subject.diagnosis.save(folder / "diagnosis.json")
    stage("prescribing and realizing over rho")
    points, rows = subject.trade_off(RHOS)
    stage("verifying the refit compression against controls, bounds and corrupted images")
    about = {"model": name, "training": short.description, "epochs": len(trained.history)}
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
        accuracy=measures(evidence)["original_accuracy"]["value"],
        rows=rows,
        seconds=time.perf_counter() - began,
    )


class _Stages:
    """Logs the stage that begins."""

    def __init__(self, log: Log, total: int):
        self._say, self._total, self._number = log, total, 0

    def __call__(self, what: str) -> None:
        self._number += 1
        self._say(f"[{self._number}/{self._total}] {what}")


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
