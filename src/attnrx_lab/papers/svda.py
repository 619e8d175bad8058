"""The SVDA experiment, which trains a model, compresses it by each rule and realization, and measures the results."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import DATASETS, ImageSet, Splits, load_data
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules import EnergyRetention, Rule
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Accuracy, Comparison, Costs, Fidelity
from attnrx.support.errors import DataError, NoOpPrescription, UnknownName
from attnrx.support.progress import Log
from attnrx.training import TrainingConfig, train
from attnrx.vit.models import build_model
from attnrx.workflows.load import load
from attnrx_lab.checks import Bounds, Controls
from attnrx_lab.papers.experiment import (
    Experiment,
    MeasureKey,
    comparison_with,
    evidence_at,
    evidence_by,
    first_images,
    measures,
    plain_measures,
)
from attnrx_lab.papers.plan import BACKWARD, Training, fewer, training_images
from attnrx_lab.papers.sources import HELD_OUT, generated_splits
from attnrx_lab.rules import TopRank, control_prescriptions
from attnrx_lab.vision_transformer import SCENARIOS, named_config

KINDS = ("mask", "renormalized", "exact", "refit")  # the kinds of `realized`
CONTROL_KINDS = ("mask", "renormalized", "refit")  # how controls are realized

# The retention ratios, and the share of directions that every head keeps in a stronger cut at a fixed rank.
RHOS, RANK_SHARE = (0.85, 0.90, 0.95), 0.5

# The rules of the rows by name. Each is a function of the number of directions in a head.
RULES: dict[str, Callable[[int], Rule]] = {
    **{f"rho-{rho:.2f}": lambda directions, rho=rho: EnergyRetention(rho) for rho in RHOS},
    f"share-{RANK_SHARE:.2f}": lambda directions: TopRank(round(RANK_SHARE * directions)),
}

CONTROLS = "controls-"  # the prefix of the evidence about controls, before the kind
RATIO = "discrepancy_over_renormalized"  # refit's discrepancy divided by renormalized's

# A tiny run's model has one layer of two heads with 32 directions each, and images of four tokens.
TINY_MODEL = {"image_size": 8, "patch_size": 4, "width": 64, "depth": 1, "heads": 2, "mlp_ratio": 1.0}
TINY_CLASSES = 4

DIAGNOSED = 512  # images for the diagnosis, and not more, because this experiment's rules use only the strengths


@dataclass(frozen=True)
class SvdaExperiment(Experiment):
    """Trains one SVDA model on one dataset with one seed, prunes it by every rule, and measures the results.

    The default epochs, batch size and seed are the paper's for 32x32 images (SVDA, Table 4). Training settings that the
    paper does not state are `TrainingConfig`'s defaults. `draws` (the number of random controls) and the numbers of
    images are our choices. `strength_init` is the initial value of the strengths, and `strength_learning_rate`
    multiplies their learning rate. `train_images` limits the training images, and `test_images` limits the validation
    and the test images. `control_images` limits the test images for the controls. A limit of None means that the whole
    split is used. `dataset` is the location of the images. It is needed only if `load_data` cannot find the images by
    the name `subject`. The images in `dataset` are resized and normalized like the published images of `subject`.
    """

    kind: ClassVar[str] = "svda"
    knobs: ClassVar[tuple[str, ...]] = (
        *("epochs", "batch_size", "precision", "strength_init", "strength_learning_rate", "draws"),
        *("train_images", "test_images", "control_images", "calibration_images", "dataset"),
    )
    chosen: ClassVar[tuple[str, ...]] = (
        *Experiment.chosen,
        *("strength_init", "strength_learning_rate", "control_images"),
    )

    subject: str
    seed: int = 42
    epochs: int = 80
    batch_size: int = 256
    precision: Literal["bf16", "fp32"] = "bf16"
    strength_init: float | None = None
    strength_learning_rate: float = 1.0
    draws: int = 10
    train_images: int | None = None
    test_images: int | None = None
    control_images: int | None = None
    calibration_images: int = 512
    dataset: str | None = None
    tiny: bool = False

    def __post_init__(self):
        if self.subject not in SCENARIOS:
            raise UnknownName("dataset of the SVDA experiment", self.subject, SCENARIOS)

    def as_tiny(self) -> "SvdaExperiment":
        return replace(self, tiny=True, epochs=2, batch_size=16, draws=3, calibration_images=32)

    def splits(self) -> Splits:
        """Loads the images of the subject. If `dataset` is set, loads the images in `dataset` instead.

        The images in `dataset` get the subject's size and normalization.

        Raises:
            DataError: `dataset` has another number of classes.
        """
        if self.tiny:
            channels = SCENARIOS[self.subject].get("channels", 3)
            return generated_splits(self.subject, channels, TINY_CLASSES, TINY_MODEL["image_size"])
        if self.dataset is None:
            return load_data(self.subject)
        card = DATASETS[self.subject]
        splits = load_data(self.dataset, geometry=card.geometry).renormalized(card.normalization)
        if (found := len(splits.class_names)) != (expected := named_config("svda", self.subject).classes):
            raise DataError(
                f"{self.dataset} has {found} classes, and {self.subject} has {expected}: give a copy of "
                f"{self.subject}, or choose the scenario of these images with --only."
            )
        return splits

    def images(self) -> Splits:
        """Returns the images of this run, limited to the numbers of images in the settings."""
        splits = self.splits()
        return replace(
            splits,
            train=first_images(splits.train, self.train_images),
            validation=first_images(splits.validation, self.test_images),
            test=first_images(splits.test, self.test_images),
        )

    def model(self, splits: Splits) -> nn.Module:
        """Returns a new, untrained model that has the normalization of the data."""
        changes = {**TINY_MODEL, "classes": TINY_CLASSES} if self.tiny else {}
        scale = splits.normalization
        return build_model(f"svda:{self.subject}", seed=self.seed, mean=scale.mean, std=scale.std, **changes)

    def training(self) -> TrainingConfig:
        """Returns the training settings of SVDA's Table 4, with attnrx's defaults for everything else."""
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            precision=self.precision,
            strength_init=self.strength_init,
            strength_learning_rate=self.strength_learning_rate,
            seed=self.seed,
            compile=torch.cuda.is_available() and not self.tiny,
            # An interruption loses at most these steps, which take minutes on a CPU and seconds on a GPU. On a GPU, one
            # checkpoint takes as long as about fifty steps.
            checkpoint_every=2000 if torch.cuda.is_available() else 100,
        )

    def trainings(self) -> tuple[Training, ...]:
        if self.tiny:
            return ()
        costs = named_config("svda", self.subject).costs()
        images = fewer(training_images(self.dataset or self.subject, HELD_OUT), self.train_images)
        macs = BACKWARD * (costs.macs + costs.classifier_macs)
        return (Training(self.name, self.epochs, images, self.batch_size, macs, self.precision),)

    def stages(self, keys: Collection[MeasureKey] | None = None) -> frozenset[str]:
        """Returns the stage names RULE/KIND and RULE/controls-KIND, which are also the names of the evidence files."""
        if keys is None:
            parts = (*KINDS, *(f"{CONTROLS}{kind}" for kind in CONTROL_KINDS))
            return frozenset(f"{rule}/{part}" for rule in RULES for part in parts)
        return frozenset(f"{rule}/{part}" for rule, kind, quantity in keys for part in _parts(kind, quantity))

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Trains and diagnoses the model, and then prunes and measures it as the requested stages require.

        Checkpoints are stored in `train/`, so an interrupted training continues from its last checkpoint.
        """
        splits = self.images()
        self.claim(folder)
        log(f"{self.name}: training in {folder / 'train'}")
        trained = train(self.model(splits), splits, self.training(), folder / "train", log=log)
        model = load(trained.folder)  # on the CPU and not compiled, as it was saved
        diagnosis = diagnose(model, splits.validation, images=min(DIAGNOSED, len(splits.validation)))
        comparison = comparison_with(model, splits.test, seed=self.seed, diagnosis=diagnosis)
        # Candidates are made from the comparison's model, so that strengths are fitted on the comparison's device.
        calibration = first_images(splits.train, self.calibration_images)
        bench = _Bench(self, comparison.reference, diagnosis, calibration, comparison)
        directions = max(layer.spectrum.strength.shape[1] for layer in diagnosis.layers)
        rules = {}
        for name, rule in RULES.items():
            parts = {stage.removeprefix(f"{name}/") for stage in stages if stage.startswith(f"{name}/")}
            if parts:
                rules[name] = bench.examined(rule(directions), folder / "evidence" / name, parts, log)
        notes = list(splits.notes)
        if any(CONTROLS in stage for stage in stages):
            controlled = first_images(splits.test, self.control_images)
            notes.append(
                f"controls: {self.draws} random draws for each prescription, n = {len(controlled):,} test images"
            )
        data = {"name": splits.name, "images": len(splits.test), "test": splits.test.fingerprint, "notes": notes}
        return {"data": data, "model": {"fingerprint": diagnosis.fingerprint}, "rules": rules}


def _parts(kind: str, quantity: str) -> tuple[str, ...]:
    """Returns the names of the evidence files that are needed to compute `quantity` for the realization `kind`."""
    if quantity == RATIO:
        return kind, "renormalized"  # the numerator and the denominator of the ratio
    return (f"{CONTROLS}{kind}",) if "_than_" in quantity else (kind,)  # findings of the check `controls` have "_than_"


def realized(model: nn.Module, prescription: Prescription, kind: str, calibration: ImageSet) -> nn.Module:
    """Builds the pruned model. `kind` is the argument `by` of `realize`, but with "exact" in place of "compress"."""
    return realize(model, prescription, by="compress" if kind == "exact" else kind, calibration=calibration)


@dataclass(frozen=True, eq=False)
class _Bench:
    """A trained model and the data for measuring its pruned candidates. `comparison` caches predictions."""

    experiment: SvdaExperiment
    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    comparison: Comparison

    def examined(self, rule: Rule, folder: Path, parts: Collection[str], log: Log) -> dict[str, Any]:
        """Measures one rule, and returns its numbers by kind of realization (empty if the rule removes nothing).

        `parts` are the names of the evidence files to make.
        """
        try:
            prescription = prescribe(self.diagnosis, rule)
        except NoOpPrescription as error:
            log(f"{self.experiment.name}: {error}")
            return {}
        # The removed share is stored with every realization, because a column uses the numbers of only one realization.
        removed = plain_measures({"removed": 100 * prescription.removed_share})
        numbers: dict[str, Any] = {kind: dict(removed) for kind in KINDS}
        for part, make in self._parts(prescription):
            if part in parts:
                log(f"{self.experiment.name}: {folder.name}, {part}")
                numbers[part.removeprefix(CONTROLS)] |= measures(evidence_at(folder / f"{part}.json", make))
        # The ratio of refit to renormalized needs the evidence about both realizations.
        distances = [numbers[kind].get("discrepancy_to_original") for kind in ("refit", "renormalized")]
        if all(distances) and distances[1]["value"] > 0:
            numbers["refit"] |= plain_measures({RATIO: distances[0]["value"] / distances[1]["value"]})
        return numbers

    def _parts(self, prescription: Prescription) -> Iterator[tuple[str, Callable[[], Evidence]]]:
        """Yields the names of one prescription's evidence files, each with the function that computes the evidence."""
        # Every realization is compared with the masked model, which is made when it is first needed, and then cached.
        masked = cache(partial(self._realized, prescription, "mask"))
        for kind in KINDS:
            yield kind, partial(self._measured, prescription, kind, masked)
        for kind in CONTROL_KINDS:
            yield f"{CONTROLS}{kind}", partial(self._controlled, prescription, kind)

    def _measured(self, prescription: Prescription, kind: str, masked: Callable[[], nn.Module]) -> Evidence:
        """Measures accuracy, fidelity and costs of one realization, and for the masked model the theorems' bounds."""
        candidate = masked() if kind == "mask" else self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, masked=masked(), prescription=prescription)
        bounds = [Bounds(images=16 if self.experiment.tiny else 256)] if kind == "mask" else []
        checks = [Accuracy(most_drop=None), Fidelity(), Costs(), *bounds]
        return evidence_by(checks, comparison, self.experiment, realization=kind)

    def _controlled(self, prescription: Prescription, kind: str) -> Evidence:
        """Compares the candidate with matched controls that are realized in the same way."""
        experiment = self.experiment
        prescriptions = control_prescriptions(
            self.diagnosis, prescription, ("random", "largest"), experiment.draws, experiment.seed
        )
        controls = Controls(prescriptions, lambda control: self._realized(control, kind))
        candidate = self._realized(prescription, kind)
        comparison = replace(self.comparison, candidate=candidate, prescription=prescription)
        return evidence_by([controls], comparison.taking(experiment.control_images), experiment, realization=kind)

    def _realized(self, prescription: Prescription, kind: str) -> nn.Module:
        return realized(self.model, prescription, kind, self.calibration)
