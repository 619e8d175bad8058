"""The IrrAtt experiment: a pre-trained model and several ways of compressing it, with costs and quality."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from attnrx.api import adapt_preprocessing
from attnrx.data import Columns, Splits, load_data
from attnrx.errors import InvalidInput
from attnrx.models import family_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict
from attnrx.training import Reporter, TrainingConfig
from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.irratt_methods import IrrattMethod
from attnrx_lab.papers.pretrained_subject import loaded, outline_of, tiny_splits, tiny_twin

# timm's decay for the running mean of a DeiT's weights; the paper does not state its decay.
EMA = 0.99996


def table_3(epochs: int, batch_size: int, seed: int) -> TrainingConfig:
    """The fine-tuning of Table 3: AdamW at 5e-5, no weight decay, a cosine from and to 1e-6, a mean of the weights."""
    return TrainingConfig(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=5e-5,
        min_learning_rate=1e-6,
        warmup_learning_rate=1e-6,
        weight_decay=0.0,
        warmup_epochs=min(5.0, epochs / 10),
        ema=EMA,
        seed=seed,
    )


@dataclass(frozen=True)
class IrrattRun(Run):
    """A finished run of the IrrAtt experiment."""

    kind: ClassVar[str] = "attnrx irratt run"

    @property
    def experiment(self) -> "IrrattExperiment":
        """The settings of the run."""
        return IrrattExperiment.from_dict(self.record["settings"])


@dataclass(frozen=True)
class IrrattExperiment(Experiment):
    """One pre-trained model: every method prescribes for it, and its model is fine-tuned for `epochs` and measured.

    `subject` is the name of the model, `model` and `weights` the arguments of `load`, `dataset` and the columns those
    of
    `load_data`. Values and MLP are prescribed on the first `calibration_images` of the training images, which the seed
    divides from the validation images; the scores by the weights, in `metric`, with the seed for every start. Nothing
    is
    fine-tuned by default: if the data has few of a model's classes, training on it would let every method gain by
    forgetting
    the others. `tiny` measures a tiny model on generated images; the costs are always those of the model itself.
    """

    kind: ClassVar[str] = "irratt"
    run_type: ClassVar[type[Run]] = IrrattRun
    told_when_tiny: ClassVar[str] = (
        "accuracy, agreement and what is realized are of a tiny model on generated images: they show that the recipe "
        "runs, and nothing else; the compression ratios (CR) are exact"
    )
    knobs: ClassVar[Mapping[str, str]] = {
        "model": "the model {own} instead of {protocol}",
        "weights": "weights from a file ({own})",
        "dataset": "data {own} instead of {protocol}",
        "label_column": "labels from the column {own} instead of {protocol}",
        "test_column": "tested where {own} is true, instead of {protocol}",
        "epochs": "{own} epochs of fine-tuning instead of {protocol}",
        "batch_size": "fine-tuned in steps of {own} images instead of {protocol}",
        "calibration_images": "{own} calibration images instead of {protocol}",
        "test_images": "measured on {own} test images",
    }

    subject: str
    model: str
    dataset: str
    methods: tuple[IrrattMethod, ...]
    seed: int = 0
    weights: str | None = None
    label_column: str | None = None
    test_column: str | None = None
    metric: str = "augmented"
    epochs: int = 0
    batch_size: int = 256
    calibration_images: int = 96
    test_images: int | None = None
    tiny: bool = False

    def __post_init__(self):
        names = [method.name for method in self.methods]
        if not names or len(set(names)) != len(names):
            raise InvalidInput(f"IrrattExperiment(methods={names}): give at least one method, each under its own name.")
        for name in ("batch_size", "calibration_images", "test_images"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InvalidInput(f"IrrattExperiment({name}={count}): give 1 or more.")
        if self.epochs < 0:
            raise InvalidInput(f"IrrattExperiment(epochs={self.epochs}): give 0 for no fine-tuning, or more.")

    @property
    def scenario(self) -> str:
        """The name of the model: one dataset may serve several."""
        return self.subject

    def as_tiny(self) -> "IrrattExperiment":
        """The same methods on a tiny model, in seconds, without fine-tuning."""
        return replace(self, tiny=True, epochs=0, batch_size=16, calibration_images=32)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> IrrattRun:
        """Computes costs, prescribes, realizes, fine-tunes and measures: `run_irratt`."""
        from attnrx_lab.papers.irratt import run_irratt  # avoids an import cycle

        return run_irratt(self, folder, reporter=reporter, log=log)

    def outline(self) -> nn.Module:
        """The shapes of the model."""
        return outline_of(self.model)

    def original(self) -> nn.Module:
        """The model itself, or its tiny stand-in."""
        return tiny_twin(self.outline(), self.seed) if self.tiny else loaded(self.model, self.weights)

    def splits(self, model: nn.Module) -> Splits:
        """Loads the data at the size and on the scale of the model, or generates it."""
        if self.tiny:
            return adapt_preprocessing(tiny_splits(self.subject), model)
        _, size, _ = family_of(model).input_shape(model)
        return adapt_preprocessing(
            load_data(self.dataset, image_size=size, seed=self.seed, columns=self._columns()), model
        )

    def training(self) -> TrainingConfig:
        """How a candidate is fine-tuned."""
        return table_3(self.epochs, self.batch_size, self.seed)

    def _columns(self) -> Columns | None:
        given = {"label_column": self.label_column, "test_column": self.test_column}
        named = {part: column for part, column in given.items() if column is not None}
        return Columns(**named) if named else None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "IrrattExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls, IrrattMethod))
