"""A model and a short training for any dataset, for the demonstration."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from attnrx.data import Splits
from attnrx.models import SCENARIOS, build_model
from attnrx.training import TrainingConfig

STEPS = 400  # for datasets that are not listed here, in whole epochs
MOST_PATCH = 16


@dataclass(frozen=True)
class ShortTraining:
    """The training of a dataset for a demonstration.

    The strengths start at `strength` and learn `strength_factor` times faster than the other weights. With a start of 1
    and
    the common rate, they would hardly spread in so few steps: every rule would remove what energy retention removes of
    equal
    strengths, and attention would be almost uniform. The SVDA paper does not state where its strengths start or how
    fast
    they learn.
    """

    epochs: int | None = None
    batch_size: int = 128
    learning_rate: float = 1e-3
    strength: float = 4.0
    strength_factor: float = 20.0
    precision: Literal["bf16", "fp32"] = "bf16"

    def config(self, splits: Splits, seed: int, epochs: int | None = None) -> TrainingConfig:
        """Returns the training, of this many epochs if requested."""
        batch = min(self.batch_size, len(splits.train))
        budget = max(1, round(STEPS / (len(splits.train) // batch)))
        return TrainingConfig(
            epochs=epochs or self.epochs or budget,
            batch_size=batch,
            learning_rate=self.learning_rate,
            strength_init=self.strength,
            strength_learning_rate=self.strength_factor,
            precision=self.precision,
            seed=seed,
            checkpoint_every=100,
        )

    @property
    def description(self) -> str:
        """A note on the training, for readers of the results."""
        return (
            f"a short training made to show something: strengths start at {self.strength:g} and learn "
            f"{self.strength_factor:g} times faster than the other weights, so that they spread; "
            "the SVDA paper trains for many more epochs, and does not state how its strengths start"
        )


SHORT_TRAININGS = {"digits": ShortTraining(epochs=30, batch_size=32, learning_rate=2e-3, precision="fp32")}


def short_training(splits: Splits) -> ShortTraining:
    """Returns the training for a dataset."""
    return SHORT_TRAININGS.get(splits.name, ShortTraining())


def small_model(splits: Splits, seed: int) -> tuple[str, nn.Module]:
    """Returns the name and the model for a dataset: its own scenario, else the compact one of its shape."""
    scale = {"mean": splits.normalization.mean, "std": splits.normalization.std}
    shape = {"channels": splits.channels, "classes": len(splits.class_names), "image_size": splits.image_size}
    if splits.name in SCENARIOS and SCENARIOS[splits.name].get("image_size", 32) == splits.image_size:
        name = f"svda:{splits.name}"
        return name, build_model(name, seed=seed, **scale, **shape)
    name = "svda:cifar10"
    return name, build_model(name, seed=seed, patch_size=patch_size(splits.image_size), **scale, **shape)


def patch_size(side: int) -> int:
    """Returns the divisor of the side that is nearest to an eighth of it, and to 16 for large images."""
    wanted = min(side / 8, MOST_PATCH)
    return min((size for size in range(1, side + 1) if side % size == 0), key=lambda size: abs(size - wanted))
