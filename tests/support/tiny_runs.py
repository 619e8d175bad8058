"""Tiny training runs on random images: six steps of two epochs, every knob that could break an exact resume turned on.

Run as a script it makes one such run, for the tests that need a process of their own:

    python tests/support/tiny_runs.py FOLDER [STEP]     kills itself without warning after STEP
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch

from attnrx.data import Augmentation, ImageSet, Normalization, Splits, from_tensors
from attnrx.support.progress import Log, no_log
from attnrx.training import TrainingConfig, TrainingRun, train, trainer
from attnrx.training.losses import Task
from attnrx_lab.perturbation import PerturbationRobustness, TargetRank
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_

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


def at(step: int, action: Callable[[], object]) -> AbstractContextManager[object]:
    """A context in which every training does something after a step, when its state has been checked and saved."""
    check = trainer._Run._check

    def acting(run: trainer._Run, interruption: Event) -> None:
        check(run, interruption)
        if run.step == step:
            action()

    return mock.patch.object(trainer._Run, "_check", acting)


def model() -> VisionTransformer:
    """A fresh model in float64, whatever the default is at the moment."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return initialize_(VisionTransformer(MODEL), seed=5)
    finally:
        torch.set_default_dtype(before)


def run(
    folder: Path, context: AbstractContextManager[object] | None = None, log: Log = no_log, **changes: Any
) -> TrainingRun:
    with context or nullcontext():
        return train(model(), splits(), config(**changes), folder, log=log)


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
    run(Path(sys.argv[1]), at(last, lambda: os.kill(os.getpid(), signal.SIGKILL)))
