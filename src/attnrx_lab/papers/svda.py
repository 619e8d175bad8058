"""The SVDA experiment: one model is trained, and measured as each rule and realization compresses it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.api import control_prescriptions, diagnose, load, prescribe, realize
from attnrx.checks import Accuracy, Bounds, Check, Comparison, Controls, Costs, Fidelity
from attnrx.data import ImageSet, Splits, load_data
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NoOpPrescription, UnknownName
from attnrx.evidence import Evidence
from attnrx.models import SCENARIOS, build_model, family_of, model_fingerprint
from attnrx.prescription import Prescription
from attnrx.progress import Log
from attnrx.reports.numbers import MISSING, number
from attnrx.rules import EnergyRetention, Rule, TopRank
from attnrx.serialization.config import to_dict
from attnrx.training import Reporter, TrainingConfig, TrainingRun, train
from attnrx_lab.comparison.comparing import markdown_table
from attnrx_lab.papers.experiment import (
    Experiment,
    Run,
    comparison_with,
    evidence_at,
    first_images,
    measured_with,
    measures,
    plain_measure,
)
from attnrx_lab.papers.sources import generated_splits

KINDS = ("mask", "renormalized", "exact", "refit")

# The model of a tiny run: one layer of two heads with 32 directions each, on images of four tokens.
TINY_MODEL = {"image_size": 8, "patch_size": 4, "width": 64, "depth": 1, "heads": 2, "mlp_ratio": 1.0}
TINY_CLASSES = 4

DIAGNOSED = 512  # images of the diagnosis; the rules of this experiment use the strengths alone


@dataclass(frozen=True)
class SvdaExperiment(Experiment):
    """One dataset, one seed: the training, the prescriptions, and the numbers of images.

    Epochs, batch size and seeds are those of the paper for 32x32 images (Table 4); training settings that it does not
    state are those of `TrainingConfig`, and `draws` and the numbers of images are chosen here. Besides the retention
    ratios `rhos` every head is cut to `rank_share` of its directions, a stronger cut that does not depend on the spread
    of the strengths. Controls are realized in the ways that `control_kinds` names. `test_images` and `control_images`
    limit the test images of candidates and controls; None means the whole test split. `tiny` runs on generated images
    with a tiny model, as a smoke test; its numbers mean nothing.
    """

    kind: ClassVar[str] = "svda"
    format: ClassVar[str] = "attnrx svda run"
    knobs: ClassVar[Mapping[str, str]] = {
        "epochs": "{own} epochs instead of {protocol}",
        "batch_size": "trained in steps of {own} images instead of {protocol}",
        "draws": "{own} random controls instead of {protocol}",
        "test_images": "measured on {own} test images",
        "control_images": "controls measured on {own} test images",
        "calibration_images": "{own} calibration images instead of {protocol}",
        "control_kinds": "controls realized as {own} instead of {protocol}",
    }

    dataset: str
    seed: int = 42
    epochs: int = 80
    batch_size: int = 256
    strength_init: float | None = None
    strength_learning_rate: float = 1.0
    rhos: tuple[float, ...] = (0.85, 0.90, 0.95)
    rank_share: float | None = 0.5
    kinds: tuple[str, ...] = KINDS
    control_kinds: tuple[str, ...] = ("mask", "renormalized", "refit")
    draws: int = 10
    test_images: int | None = None
    control_images: int | None = None
    calibration_images: int = 512
    bound_images: int = 256
    compile: bool = False
    tiny: bool = False

    def __post_init__(self):
        if self.dataset not in SCENARIOS:
            raise UnknownName("dataset of the SVDA experiment", self.dataset, SCENARIOS)
        for name in ("kinds", "control_kinds"):
            strange = sorted(set(getattr(self, name)) - set(KINDS))
            if strange:
                raise UnknownName(f"realization in {name}", strange[0], KINDS)
        if not (self.rhos or self.rank_share):
            raise InvalidInput("SvdaExperiment without rhos and rank_share prescribes nothing; give at least one.")
        self.require_counts("draws", "calibration_images", "bound_images", "test_images", "control_images")

    @property
    def scenario(self) -> str:
        return self.dataset

    def as_tiny(self) -> "SvdaExperiment":
        return replace(
            self, tiny=True, epochs=2, batch_size=16, draws=3, calibration_images=32, bound_images=16, compile=False
        )

    def here(self) -> "SvdaExperiment":
        """Compiled on an accelerator."""
        return replace(self, compile=torch.cuda.is_available())

    def splits(self) -> Splits:
        if self.tiny:
            channels = SCENARIOS[self.dataset].get("channels", 3)
            return generated_splits(self.dataset, channels, TINY_CLASSES, TINY_MODEL["image_size"])
        return load_data(self.dataset)

    def model(self, splits: Splits) -> nn.Module:
        """Returns a new model with the normalization of the data."""
        changes = {**TINY_MODEL, "classes": TINY_CLASSES} if self.tiny else {}
        scale = splits.normalization
        return build_model(f"svda:{self.dataset}", seed=self.seed, mean=scale.mean, std=scale.std, **changes)

    def training(self) -> TrainingConfig:
        """Returns the training: Table 4 by default, with the other defaults of this package."""
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=self.seed,
            strength_init=self.strength_init,
            strength_learning_rate=self.strength_learning_rate,
            compile=self.compile,
            checkpoint_every=100,  # steps that an interruption may lose
        )

    def rules(self, directions: int) -> dict[str, Rule]:
        """Returns the rules by name, for heads of this many directions."""
        rules: dict[str, Rule] = {f"rho-{rho:.2f}": EnergyRetention(rho) for rho in self.rhos}
        if self.rank_share is not None:
            rules[f"share-{self.rank_share:.2f}"] = TopRank(max(1, round(self.rank_share * directions)))
        return rules

    def measured(self, folder: Path, reporter: Reporter | None, log: Log) -> dict[str, Any]:
        """Trains, diagnoses, prescribes, realizes and measures.

        `train/` is the trainer's own folder, so an interrupted training continues from its last checkpoint.
        """
        splits = self.splits()
        self.claim(folder)
        log(f"{self.name}: training in {folder / 'train'}")
        trained = train(self.model(splits), splits, self.training(), folder / "train", reporter=reporter)
        model = load(trained.folder)  # as saved: on the CPU, and not compiled
        diagnosis = _diagnosed(model, splits, folder)
        test = first_images(splits.test, self.test_images)
        comparison = comparison_with(model, test, seed=self.seed, diagnosis=diagnosis)
        bench = _Bench(self, model, diagnosis, first_images(splits.train, self.calibration_images), comparison)
        directions = max(layer.spectrum.strength.shape[1] for layer in diagnosis.layers)
        rules = {name: _examined(bench, name, rule, folder, log) for name, rule in self.rules(directions).items()}
        costs = family_of(model).costs(model)
        return {
            "data": {"name": splits.name, "test": test.fingerprint, "notes": list(splits.notes)},
            "model": {"fingerprint": diagnosis.fingerprint, "params": costs.params, "macs": costs.macs},
            "training": _about_training(trained),
            "epochs": [_epoch(line, directions) for line in trained.history],
            "rules": rules,
            "measured_with": measured_with(),
        }


def realized(model: nn.Module, prescription: Prescription, kind: str, calibration: ImageSet) -> nn.Module:
    """Realizes a prescription by `kind`: "mask", or one of the compressions."""
    if kind == "mask":
        return realize(model, prescription, by="mask")
    return realize(model, prescription, by="compress", norms=kind, calibration=calibration)


@dataclass(frozen=True, eq=False)
class _Bench:
    """A trained model and what its candidates are measured with; the comparison caches the model's predictions."""

    experiment: SvdaExperiment
    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    comparison: Comparison

    def stages(self, prescription: Prescription) -> Iterator[tuple[str, Callable[[], Evidence]]]:
        """Returns the pieces of evidence about one prescription by name, each with the function that computes it."""
        # Realized when the first stage that is not stored needs it, and kept: every realization is compared with it.
        masked = cache(lambda: self._realized(prescription, "mask"))
        for kind in self.experiment.kinds:
            yield kind, lambda kind=kind: self._measured(prescription, kind, masked())
        for kind in self.experiment.control_kinds:
            yield f"controls-{kind}", lambda kind=kind: self._controlled(prescription, kind)

    def _measured(self, prescription: Prescription, kind: str, masked: nn.Module) -> Evidence:
        """Returns accuracy, fidelity and costs of one realization; for the mask also the bounds of the theorems."""
        candidate = masked if kind == "mask" else self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, masked=masked, prescription=prescription)
        checks: list[Check] = [Accuracy(most_drop=None), Fidelity(), Costs()]
        if kind == "mask":
            checks.append(Bounds(images=self.experiment.bound_images))
        return self._evidence(checks, comparison, kind)

    def _controlled(self, prescription: Prescription, kind: str) -> Evidence:
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


def _diagnosed(model: nn.Module, splits: Splits, folder: Path) -> Diagnosis:
    path = folder / "diagnosis.json"
    if path.exists():
        diagnosis = Diagnosis.load(path)
        diagnosis.require(model_fingerprint(model), f"the model in {folder / 'train'}")
        return diagnosis
    diagnosis = diagnose(model, splits.validation, images=min(DIAGNOSED, len(splits.validation)))
    diagnosis.save(path)
    return diagnosis


def _examined(bench: _Bench, name: str, rule: Rule, folder: Path, log: Log) -> dict[str, Any]:
    """Returns every measure of one rule's prescription, or the reason why there is none."""
    path = folder / "prescriptions" / f"{name}.json"
    try:
        prescription = Prescription.load(path) if path.exists() else prescribe(bench.diagnosis, rule)
    except NoOpPrescription as error:
        return {"removed": 0.0, "nothing_changed": str(error)}
    prescription.require(bench.diagnosis.fingerprint)  # a stored one may be of another training
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
        if bounds := evidence.of("bounds"):
            found["bounds"] = [
                {"bound": each.details["quantity"], "worst": each.value, "outcome": each.outcome, "images": each.n}
                for each in bounds
            ]
    _add_ratio(found)
    return found


def _add_ratio(found: dict[str, Any]) -> None:
    """Adds the distance of refit from the original, as a share of the renormalized model's distance."""
    name = "discrepancy_to_original"
    refit, renormalized = (found.get(kind, {}).get(name) for kind in ("refit", "renormalized"))
    if refit and renormalized and renormalized["value"] > 0:
        found["refit"]["discrepancy_over_renormalized"] = plain_measure(refit["value"] / renormalized["value"])


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


def spread_over_epochs(runs: Sequence[Run]) -> str:
    """Returns a Markdown table with one line per epoch: means over layers, heads and runs of the same length."""
    rows = [
        [str(epochs[0]["epoch"]), *(_mean([epoch[name] for epoch in epochs]) for name in COLUMNS)]
        for epochs in zip(*(run.record["epochs"] for run in runs), strict=True)
    ]
    return markdown_table(["epoch", *COLUMNS.values()], rows) + "\n"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return number(fmean(known)) if known else MISSING
