"""One run of the SVDA experiment, from training to numbers; an interrupted run continues on the next call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from attnrx.api import diagnose, load, prescribe
from attnrx.data import Splits
from attnrx.diagnosis import Diagnosis
from attnrx.errors import NoOpPrescription
from attnrx.evidence import Evidence
from attnrx.models import family_of, model_fingerprint
from attnrx.prescription import Prescription
from attnrx.progress import Log, no_log
from attnrx.reports.numbers import MISSING, number
from attnrx.rules import Rule
from attnrx.serialization.config import to_dict
from attnrx.serialization.storage import write_json
from attnrx.training import Reporter, TrainingRun, train
from attnrx_lab.papers.evidence_bench import EvidenceBench, evidence_at
from attnrx_lab.papers.measures import measures, plain_measure
from attnrx_lab.papers.svda_experiment import SvdaExperiment, SvdaRun

DIAGNOSED = 512  # images of the diagnosis; the rules of this experiment use the strengths alone


def run_svda(
    experiment: SvdaExperiment, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log
) -> SvdaRun:
    """Trains, diagnoses, prescribes, realizes and measures; every stage is stored and never repeated.

    `train/` is the trainer's own folder, so an interrupted training continues from its last checkpoint. A folder that
    holds another experiment is refused.
    """
    folder = Path(folder)
    experiment.require(folder)
    if (folder / "result.json").exists():
        return SvdaRun.load(folder)
    splits = experiment.splits()
    experiment.claim(folder)
    log(f"{experiment.name}: training in {folder / 'train'}")
    trained = train(experiment.model(splits), splits, experiment.training(), folder / "train", reporter=reporter)
    model = load(trained.folder)  # as saved: on the CPU, and not compiled
    diagnosis = _diagnosed(model, splits, folder)
    bench = EvidenceBench.of(model, diagnosis, splits, experiment)
    directions = max(layer.spectrum.strength.shape[1] for layer in diagnosis.layers)
    rules = {name: _examined(bench, name, rule, folder, log) for name, rule in experiment.rules(directions).items()}
    costs = family_of(model).costs(model)
    record = {
        "kind": SvdaRun.kind,
        "schema": SvdaRun.schema,
        "settings": to_dict(experiment),
        "data": {"name": splits.name, "test": bench.comparison.data.fingerprint, "notes": list(splits.notes)},
        "model": {"fingerprint": diagnosis.fingerprint, "params": costs.params, "macs": costs.macs},
        "training": _about_training(trained),
        "epochs": [_epoch(line, directions) for line in trained.history],
        "rules": rules,
        "measured_with": {"device": str(bench.comparison.device), "threads": torch.get_num_threads()},
    }
    write_json(folder / "result.json", record)
    log(f"{experiment.name}: done, {folder / 'result.json'}")
    return SvdaRun.load(folder)


def _diagnosed(model: nn.Module, splits: Splits, folder: Path) -> Diagnosis:
    path = folder / "diagnosis.json"
    if path.exists():
        diagnosis = Diagnosis.load(path)
        diagnosis.require(model_fingerprint(model), f"the model in {folder / 'train'}")
        return diagnosis
    diagnosis = diagnose(model, splits.validation, images=min(DIAGNOSED, len(splits.validation)))
    diagnosis.save(path)
    return diagnosis


def _examined(bench: EvidenceBench, name: str, rule: Rule, folder: Path, log: Log) -> dict[str, Any]:
    """Returns every measure of one rule's prescription, or the reason why there is none."""
    path = folder / "prescriptions" / f"{name}.json"
    try:
        prescription = Prescription.load(path) if path.exists() else prescribe(bench.diagnosis, rule)
    except NoOpPrescription as error:
        return {"removed": 0.0, "nothing_changed": str(error)}
    prescription.require(bench.diagnosis.fingerprint)
    if not path.exists():
        prescription.save(path)
    found: dict[str, Any] = {
        "rule": str(rule),
        "removed": 100 * prescription.removed_share,
        "ranks": [list(ranks) for ranks in prescription.ranks],
    }
    for stage, make in bench.stages(prescription):
        log(f"{bench.experiment.name}: {name}, {stage}")
        evidence = evidence_at(folder / "evidence" / name / f"{stage}.json", make)
        kind = stage.removeprefix("controls-")
        found[kind] = {**found.get(kind, {"removed": plain_measure(found["removed"])}), **measures(evidence)}
        if evidence.of("bounds"):
            found["bounds"] = _bounds(evidence)
    _add_ratio(found)
    return found


def _bounds(evidence: Evidence) -> list[dict[str, Any]]:
    return [
        {"bound": finding.details["quantity"], "worst": finding.value, "outcome": finding.outcome, "images": finding.n}
        for finding in evidence.of("bounds")
    ]


def _add_ratio(found: dict[str, Any]) -> None:
    """Adds the distance of refit from the original, as a share of the renormalized model's distance."""
    name = "discrepancy_to_original"
    if name in found.get("refit", {}) and name in found.get("renormalized", {}):
        before = found["renormalized"][name]["value"]
        if before > 0:
            found["refit"]["discrepancy_over_renormalized"] = plain_measure(found["refit"][name]["value"] / before)


def _about_training(trained: TrainingRun) -> dict[str, Any]:
    kept = ("accuracy", "steps", "seconds", "versions", "device", "processes", "threads")
    return {name: trained.record[name] for name in kept if name in trained.record}


def _epoch(line: Mapping[str, Any], directions: int) -> dict[str, Any]:
    """Returns the spread of the strengths in an epoch: means over layers and heads, if the trainer recorded them.

    `removed` is what energy retention at rho = 0.90 would have removed after this epoch, in %.
    """
    record = {name: line[name] for name in ("epoch", "loss", "validation_accuracy")}
    for name in ("retained_rank", "effective_rank", "max_strength", "selectivity"):
        heads = [value for layer in line.get("layers", ()) for value in layer.get(name, ())]
        record[name] = sum(heads) / len(heads) if heads else None
    kept = record["retained_rank"]
    return {**record, "removed": None if kept is None else 100 * (1 - kept / directions)}


COLUMNS = {
    "removed": "% of directions that rho = 0.90 would remove",
    "effective_rank": "effective rank",
    "max_strength": "largest strength",
    "selectivity": "selectivity",
    "validation_accuracy": "validation accuracy",
}


def spread_over_epochs(runs: Sequence[SvdaRun]) -> str:
    """Returns a Markdown table with one line per epoch: means over layers, heads and runs of the same length."""
    lines = ["| epoch | " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for epochs in zip(*(run.record["epochs"] for run in runs), strict=True):
        cells = [_mean([epoch[name] for epoch in epochs]) for name in COLUMNS]
        lines.append(f"| {epochs[0]['epoch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known)) if known else MISSING
