"""How long the trainings of a recipe take on this machine: counted operations, and a few measured steps."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from attnrx.support.errors import NotSupported
from attnrx.support.progress import Log, no_log
from attnrx.training import train
from attnrx.vit.costs import device_name
from attnrx.vit.models import family_of
from attnrx_lab.papers.experiment import evaluation_device, first_images
from attnrx_lab.papers.reproduce import planned_experiments
from attnrx_lab.papers.svda import SvdaExperiment

STEPS, EPOCHS = 40, 3  # steps of an epoch, and epochs; the first one includes the compilation, the last one is timed


@dataclass(frozen=True)
class TrainingEstimate:
    """The training of one scenario: its steps, the operations of a step, and the measured rate of this machine.

    A multiplication and an addition are two floating-point operations.
    """

    scenario: str
    device: str
    runs: int
    steps: int
    batch_size: int
    flops_per_step: int
    images_per_second: float

    @property
    def flops(self) -> int:
        """The operations of one run."""
        return self.steps * self.flops_per_step

    @property
    def flops_per_second(self) -> float:
        return self.flops_per_step * self.images_per_second / self.batch_size

    @property
    def seconds(self) -> float:
        """The time of one run, without its measurements."""
        return self.seconds_at(self.flops_per_second)

    def seconds_at(self, flops_per_second: float) -> float:
        return self.flops / flops_per_second

    def __str__(self) -> str:
        milliseconds = 1000 * self.batch_size / self.images_per_second
        return (
            f"{self.scenario}: {self.steps:,} steps of {self.batch_size} images, {self.flops_per_step / 1e9:.4g} "
            f"GFLOPs each, {self.flops / 1e15:.3g} PFLOPs a run; measured on {self.device}: {milliseconds:.3g} ms a "
            f"step, {self.images_per_second:,.0f} images/s, {self.flops_per_second / 1e12:.3g} TFLOP/s; so "
            f"{self.seconds:,.0f} s a run, {self.runs * self.seconds:,.0f} s for {self.runs} one after the other"
        )


def training_flops(experiment: SvdaExperiment, images: int) -> int:
    """Returns the floating-point operations of training on a number of images, once each.

    Every product of the forward pass has two more in the backward pass, one for either factor; but the pixels, a factor
    of the patch embedding, need no gradient. Elementwise operations are not counted.
    """
    model = experiment.model(experiment.splits())
    costs = family_of(model).costs(model)
    return 2 * images * (3 * costs.product_macs - costs.patches.macs)


def estimate_training(names: Sequence[str], *, log: Log = no_log, **options: Any) -> tuple[TrainingEstimate, ...]:
    """Trains the first run of every scenario for a few steps, and returns what all of its training takes.

    `options` are those of `reproduce` that choose the runs: only, seeds, tiny and the knobs.

    Raises:
        NotSupported: A run is no SVDA experiment.
    """
    runs: dict[str, dict[int, SvdaExperiment]] = {}
    for experiment in planned_experiments(names, **options):
        if not isinstance(experiment, SvdaExperiment):
            raise NotSupported(f"the trainings of {experiment.kind} runs are not estimated; give recipes of svda.")
        runs.setdefault(experiment.scenario, {})[experiment.seed] = experiment
    return tuple(_estimate(next(iter(seeds.values())), len(seeds), log) for seeds in runs.values())


def _estimate(experiment: SvdaExperiment, runs: int, log: Log) -> TrainingEstimate:
    splits, batch = experiment.images(), experiment.batch_size
    steps = experiment.epochs * (len(splits.train) // batch)
    log(f"{experiment.scenario}: {EPOCHS} epochs of at most {STEPS} steps")
    few = replace(
        splits,
        train=first_images(splits.train, STEPS * batch),
        **{name: first_images(getattr(splits, name), batch) for name in ("validation", "test")},
    )
    with tempfile.TemporaryDirectory() as folder:
        config = replace(experiment.training(), epochs=EPOCHS)
        trained = train(experiment.model(splits), few, config, Path(folder) / "train")
    return TrainingEstimate(
        scenario=experiment.scenario,
        device=f"{device_name(str(evaluation_device()))}, torch {torch.__version__}",
        runs=runs,
        steps=steps,
        batch_size=batch,
        flops_per_step=training_flops(experiment, batch),
        images_per_second=trained.history[-1]["images_per_second"],
    )
