"""The SVDA experiment: every setting of one run, and its data, model, training and rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from attnrx.data import Splits, load_data
from attnrx.errors import InvalidInput, UnknownName
from attnrx.models import SCENARIOS, build_model
from attnrx.progress import Log, no_log
from attnrx.rules import EnergyRetention, Rule, TopRank
from attnrx.serialization.config import from_dict
from attnrx.training import Reporter, TrainingConfig
from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.short_training import generated_splits

KINDS = ("mask", "renormalized", "exact", "refit")

# The model of a tiny run: one layer of two heads with 32 directions each, on images of four tokens.
TINY_MODEL = {"image_size": 8, "patch_size": 4, "width": 64, "depth": 1, "heads": 2, "mlp_ratio": 1.0}
TINY_CLASSES = 4


@dataclass(frozen=True)
class SvdaRun(Run):
    """A finished run of the SVDA experiment."""

    kind: ClassVar[str] = "attnrx svda run"

    @property
    def experiment(self) -> "SvdaExperiment":
        """The settings of the run."""
        return SvdaExperiment.from_dict(self.record["settings"])


@dataclass(frozen=True)
class SvdaExperiment(Experiment):
    """One dataset, one seed: the training, the prescriptions, and the numbers of images.

    Epochs, batch size and seeds are those of the paper for 32x32 images (Table 4); training settings that it does not
    state
    are those of `TrainingConfig`, and `draws` and the numbers of images are chosen here. Besides the retention ratios
    `rhos`
    every head is cut to `rank_share` of its directions, a stronger cut that does not depend on the spread of the
    strengths.
    Controls are realized in the ways that `control_kinds` names. `test_images` and `control_images` limit the test
    images of
    candidates and controls; None means the whole test split. `tiny` runs on generated images with a tiny model, as a
    smoke
    test; its numbers mean nothing.
    """

    kind: ClassVar[str] = "svda"
    run_type: ClassVar[type[Run]] = SvdaRun
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
        for name in ("draws", "calibration_images", "bound_images", "test_images", "control_images"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidInput(f"SvdaExperiment({name}={count}): give 1 or more.")

    def as_tiny(self) -> "SvdaExperiment":
        """The same run on generated images, in a second or two."""
        return replace(
            self, tiny=True, epochs=2, batch_size=16, draws=3, calibration_images=32, bound_images=16, compile=False
        )

    def here(self) -> "SvdaExperiment":
        """Compiled on an accelerator."""
        return replace(self, compile=torch.cuda.is_available())

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> SvdaRun:
        """Trains, diagnoses, prescribes, realizes and measures: `run_svda`."""
        from attnrx_lab.papers.svda import run_svda  # avoids an import cycle

        return run_svda(self, folder, reporter=reporter, log=log)

    def splits(self) -> Splits:
        """Loads the data, or generates it."""
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
            checkpoint_every=100,
        )

    def rules(self, directions: int) -> dict[str, Rule]:
        """Returns the rules by name, for heads of this many directions."""
        return dict(self._rules(directions))

    def _rules(self, directions: int) -> Iterator[tuple[str, Rule]]:
        for rho in self.rhos:
            yield f"rho-{rho:.2f}", EnergyRetention(rho)
        if self.rank_share is not None:
            yield f"share-{self.rank_share:.2f}", TopRank(max(1, round(self.rank_share * directions)))

    @classmethod
    def from_dict(cls, record: dict) -> "SvdaExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls,))
