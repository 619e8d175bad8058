"""The SPOT experiment: one model, one token policy, fine-tuned with the paper's losses and measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.api import adapt_preprocessing
from attnrx.data import Columns, Normalization, Splits, load_data
from attnrx.errors import InvalidInput
from attnrx.losses import Distillation, KeepRatio, Loss, Task, TokenSimilarity
from attnrx.models import build_model, family_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict
from attnrx.training import Reporter, TrainingConfig
from attnrx_lab.papers.experiment import Experiment, Run, first_images
from attnrx_lab.papers.pretrained_subject import loaded, outline_of
from attnrx_lab.papers.short_training import generated_splits
from attnrx_lab.papers.spot_methods import TokenMethod

DEVIATION = 0.02  # the default of attnrx models


@dataclass(frozen=True)
class SmallOriginal:
    """An original that is not pre-trained: a small model with a class token and its training, done once for all rows.

    It is an LV-ViT without token labels: its convolutional stem learns faster than patches alone. Its matrices start
    with a standard deviation of 1 / sqrt(inputs): the usual 0.02 is meant for wide models, and a narrow one learns
    slower
    with it.
    """

    image_size: int = 32
    classes: int = 10
    width: int = 64
    depth: int = 12
    heads: int = 4
    patch_size: int = 4
    mlp_ratio: float = 3.0
    stem_channels: int = 32
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-3
    seed: int = 0

    def build(self, scale: Normalization | None = None) -> nn.Module:
        """Returns a new model for images of this normalization."""
        taught = ("epochs", "batch_size", "learning_rate")
        facts: dict[str, Any] = {name: value for name, value in vars(self).items() if name not in taught}
        if scale is not None:
            facts |= {"mean": scale.mean, "std": scale.std}
        model = build_model("lvvit:t", classifies_patches=False, **facts)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim in (2, 4):  # matrices and convolutions
                    parameter.mul_(parameter[0].numel() ** -0.5 / DEVIATION)
        return model

    def training(self) -> TrainingConfig:
        """Its training."""
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            precision="fp32",
            seed=self.seed,
            checkpoint_every=200,
        )


SMALL = SmallOriginal()
# A tiny run: four layers, so that there are three stages, on images of sixteen patches.
TINY = SmallOriginal(16, 4, width=8, depth=4, heads=2, stem_channels=4, epochs=1, batch_size=32)


@dataclass(frozen=True)
class FineTuning:
    """The fine-tuning of a model with pruned tokens: Eq. 15 with the paper's weights, AdamW, a cosine.

    With `task` the labels are used too. `similarity` is the weight of Eq. 14: 0 for DeiT, 10 for LV-ViT.
    Predictors learn at `predictor_factor` times the rate. `images` of the training split are used, all if None.
    """

    learning_rate: float = 1e-3
    predictor_factor: float = 10.0
    weight_decay: float = 0.05
    task: bool = True
    keep_ratio: float = 2.0
    distillation: float = 0.5
    similarity: float = 0.0
    precision: str = "bf16"
    images: int | None = None

    def losses(self, method: TokenMethod, teacher: str, weights: str | None) -> tuple[Loss, ...]:
        """The terms for a method: those of Eqs. 12 and 14 apply to methods with sampled masks."""
        found: list[Loss] = [Task()] if self.task else []
        found.append(Distillation(teacher, weight=self.distillation, weights=weights))
        if method.learned:
            found.append(KeepRatio(self.keep_ratio))
            if self.similarity:
                found.append(TokenSimilarity(teacher, self.similarity, weights))
        return tuple(found)

    def config(self, losses: tuple[Loss, ...], epochs: int, batch_size: int, seed: int) -> TrainingConfig:
        """The training with these losses."""
        return TrainingConfig(
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=self.learning_rate,
            predictor_learning_rate=self.predictor_factor,
            weight_decay=self.weight_decay,
            precision=self.precision,
            losses=losses,
            seed=seed,
        )


@dataclass(frozen=True)
class SpotRun(Run):
    """A finished run of the SPOT experiment."""

    kind: ClassVar[str] = "attnrx spot run"

    @property
    def experiment(self) -> "SpotExperiment":
        """The settings of the run."""
        return SpotExperiment.from_dict(self.record["settings"])


@dataclass(frozen=True)
class SpotExperiment(Experiment):
    """One original, one method, one seed: new predictors, fine-tuning of trained methods, measuring.

    `subject` is the name of the original, `model` and `weights` the arguments of `load`; without a model, the `small`
    one is trained first, once for all methods and seeds of the subject. `dataset` and the columns are the arguments of
    `load_data`. The seed draws the predictors, the order of the images and the masks in training; the images are the
    same for all seeds. Everything is measured on the first `test_images`, paired with the original. `tiny` trains and
    measures a tiny model on generated images; the costs are always those of the model itself.
    """

    kind: ClassVar[str] = "spot"
    run_type: ClassVar[type[Run]] = SpotRun
    told_when_tiny: ClassVar[str] = (
        "accuracy, agreement and divergence are of a tiny model on generated images: they show that the recipe runs, "
        "and nothing else; MACs and tokens are exact"
    )
    knobs: ClassVar[Mapping[str, str]] = {
        "model": "the model {own} instead of {protocol}",
        "weights": "weights from a file ({own})",
        "dataset": "data {own} instead of {protocol}",
        "label_column": "labels from the column {own} instead of {protocol}",
        "test_column": "tested where {own} is true, instead of {protocol}",
        "epochs": "{own} epochs of fine-tuning instead of {protocol}",
        "batch_size": "fine-tuned in steps of {own} images instead of {protocol}",
        "test_images": "measured on {own} test images instead of {protocol}",
    }

    subject: str
    model: str | None
    dataset: str
    method: TokenMethod
    seed: int = 42
    weights: str | None = None
    label_column: str | None = None
    test_column: str | None = None
    small: SmallOriginal = SMALL
    tuning: FineTuning = FineTuning()
    epochs: int = 80
    batch_size: int = 512
    test_images: int | None = None
    validation_images: int | None = None
    tiny: bool = False

    def __post_init__(self):
        for name in ("test_images", "validation_images"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidInput(f"SpotExperiment({name}={count}): give 1 or more.")

    @property
    def scenario(self) -> str:
        """The name of the original: all its methods are one scenario."""
        return self.subject

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return f"{self.subject}{' (tiny)' if self.tiny else ''}, {self.method.name}, seed {self.seed}"

    @property
    def place(self) -> Path:
        """The folder of the run among all runs; nothing but the method's name distinguishes the runs of a seed."""
        subject = f"{self.subject}-tiny" if self.tiny else self.subject
        return Path(self.kind) / subject / self.method.name / f"seed-{self.seed}"

    def originals_place(self, folder: Path) -> Path:
        """The folder of the original, which all runs of a subject share, relative to that of a run."""
        parts = self.place.parts
        shared = folder.parts[-len(parts) :] == parts
        return folder.parents[2] / "originals" / parts[1] if shared else folder / "original"

    def as_tiny(self) -> "SpotExperiment":
        """The same method on a tiny model, in a second or two."""
        tuning = replace(self.tuning, precision="fp32", images=None)
        few = {"epochs": 1, "batch_size": 32, "test_images": None, "validation_images": None}
        return replace(self, tiny=True, tuning=tuning, **few)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> SpotRun:
        """Trains the original if necessary, prunes tokens, fine-tunes and measures: `run_spot`."""
        from attnrx_lab.papers.spot import run_spot  # avoids an import cycle

        return run_spot(self, folder, reporter=reporter, log=log)

    @property
    def made(self) -> bool:
        """Whether the original is trained here."""
        return self.tiny or self.model is None

    @property
    def original(self) -> SmallOriginal:
        """The training of the original, if it is trained here."""
        return TINY if self.tiny else self.small

    def outline(self) -> nn.Module:
        """The shapes of the model whose costs are computed, which a tiny run does not change."""
        if self.model is not None:
            return outline_of(self.model)
        with torch.device("meta"):
            return self.small.build()

    def splits(self) -> Splits:
        """Loads the data at the size of the model, or generates it."""
        if self.tiny:
            return generated_splits(self.subject, 3, TINY.classes, TINY.image_size)
        outline = self.outline()
        size = family_of(outline).input_shape(outline)[1]
        return self._measured(load_data(self.dataset, image_size=size, columns=self._columns()))

    def _measured(self, splits: Splits) -> Splits:
        """Returns the images for validation and test."""
        return replace(
            splits,
            validation=first_images(splits.validation, self.validation_images),
            test=first_images(splits.test, self.test_images),
        )

    def pretrained(self) -> nn.Module:
        """Loads the pre-trained original."""
        assert self.model is not None
        if self.weights is None and self.model.startswith("lvvit:"):
            raise InvalidInput(
                f"{self.model} has no weights of its own, and {self.name} needs a trained original; give the published "
                "file with --weights."
            )
        return loaded(self.model, self.weights)

    def tuned_on(self, splits: Splits, model: nn.Module) -> Splits:
        """The images for fine-tuning; the test images are excluded."""
        own = adapt_preprocessing(splits, model)
        return replace(own, train=first_images(own.train, self.tuning.images), test=own.validation)

    def training(self, teacher: str) -> TrainingConfig:
        """The fine-tuning, with the original as the teacher."""
        weights = None if self.made else self.weights
        losses = self.tuning.losses(self.method, teacher, weights)
        return self.tuning.config(losses, self.epochs, self.batch_size, self.seed)

    def _columns(self) -> Columns | None:
        given = {"label_column": self.label_column, "test_column": self.test_column}
        named = {part: column for part, column in given.items() if column is not None}
        return Columns(**named) if named else None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "SpotExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls, TokenMethod, SmallOriginal, FineTuning))
