"""A model and a short training for any dataset, and generated images."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from attnrx.data import Augmentation, Normalization, Splits, from_tensors
from attnrx.models import SCENARIOS, build_model
from attnrx.shapes import Int, Tensor, UInt8
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


SIZES = {"train": 96, "validation": 32, "test": 64}


def generated_splits(name: str, channels: int, classes: int, side: int) -> Splits:
    """Returns images whose class is the position of a bright square in noise: easy to learn, and deterministic."""
    scale = Normalization.half(channels)
    parts = {}
    for number, (split, count) in enumerate(SIZES.items()):
        labels = torch.arange(count) % classes
        parts[split] = from_tensors(
            f"{name}-generated/{split}", _pictures(labels, (channels, side), classes, number), labels, scale
        )
    return Splits(
        f"{name}-generated",
        **parts,
        class_names=tuple(f"place {number}" for number in range(classes)),
        channels=channels,
        image_size=side,
        normalization=scale,
        augmentation=Augmentation(padding=0, flip=False),
        notes=("the images are generated; numbers measured on them do not transfer to real datasets",),
    )


def _pictures(
    labels: Int[Tensor, "images"], shape: tuple[int, int], classes: int, seed: int
) -> UInt8[Tensor, "images channels side side"]:
    channels, side = shape
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 128, (len(labels), channels, side, side), generator=generator, dtype=torch.uint8)
    half = side // 2
    for picture, label in zip(pictures, labels.tolist(), strict=True):
        row, column = divmod(label % min(classes, 4), 2)
        picture[:, row * half : (row + 1) * half, column * half : (column + 1) * half] += 127
    return pictures
