"""Tiny training runs on random images: six steps of two epochs, every knob that could break an exact resume turned on.

Run as a script it makes one such run, for the tests that need a process of their own:

    python tests/support/tiny_runs.py FOLDER [STEP]     kills itself without warning after STEP
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attnrx.data import Augmentation, ImageSet, Normalization, Splits, from_tensors
from attnrx.training import Reporter, TrainingConfig, TrainingRun, train
from attnrx.training.losses import PerturbationRobustness, TargetRank, Task
from attnrx.training.reporters import Outline
from attnrx.vit.models import VisionTransformer, ViTConfig, initialize_

MODEL = ViTConfig.uniform(
    "svda", width=8, depth=2, heads=2, image_size=8, patch_size=4, channels=1, classes=3, mlp_ratio=2.0
)
NORMALIZATION = Normalization(MODEL.mean, MODEL.std)


def images(name: str, count: int) -> ImageSet:
    generator = torch.Generator().manual_seed(len(name))
    pixels = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return from_tensors(name, pixels, labels, NORMALIZATION)


def splits(count: int = 26) -> Splits:
    """26 training images: three whole batches of 8 and two images left over."""
    return Splits(
        name="noise",
        train=images("train", count),
        validation=images("validation", 11),
        test=images("test", 5),
        class_names=("a", "b", "c"),
        channels=1,
        image_size=8,
        normalization=NORMALIZATION,
        augmentation=Augmentation(padding=1, flip=True),
    )


def config(**changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 8,
        "learning_rate": 0.01,
        "warmup_epochs": 0.5,
        "losses": (Task(0.1), TargetRank(2.0), PerturbationRobustness(0.1)),
        "strength_decay": 0.1,
        "ema": 0.9,
        "precision": "fp32",
        "checkpoint_every": 2,
    }
    return TrainingConfig(**settings | changes)


class At(Reporter):
    """Does something after one step, and nothing else."""

    def __init__(self, step: int = -1, action: Callable[[], None] = lambda: None):
        self.step, self.action = step, action
        self.outline: Outline | None = None

    def started(self, outline: Outline) -> None:
        self.outline = outline

    def stepped(self, step: int, loss: float) -> None:
        if step == self.step:
            self.action()

    def epoch_ended(self, record: Mapping[str, Any]) -> None:
        pass

    def ended(self) -> None:
        pass


def model() -> VisionTransformer:
    """A fresh model in float64, whatever the default is at the moment."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return initialize_(VisionTransformer(MODEL), seed=5)
    finally:
        torch.set_default_dtype(before)


def run(folder: Path, reporter: Reporter | None = None, **changes: Any) -> TrainingRun:
    return train(model(), splits(), config(**changes), folder, reporter=reporter or At())


def weights(made: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.model.state_dict().items()}


def numbers(made: TrainingRun) -> list[dict[str, Any]]:
    """The history without what depends on the clock."""
    clock = {"seconds", "images_per_second"}
    return [{name: value for name, value in record.items() if name not in clock} for record in made.history]


def same(left: TrainingRun, right: TrainingRun) -> bool:
    """Whether two runs ended with the same weights and the same history, bit for bit."""
    ours, theirs = weights(left), weights(right)
    equal = all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    return equal and ours.keys() == theirs.keys() and numbers(left) == numbers(right)


if __name__ == "__main__":
    last = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    run(Path(sys.argv[1]), At(last, lambda: os.kill(os.getpid(), signal.SIGKILL)))
