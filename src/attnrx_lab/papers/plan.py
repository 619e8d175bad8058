"""Estimates the FLOPs of a recipe's trainings, and their time on one H100 GPU, before the recipe runs.

A plan is computed from model shapes and published image counts, so it needs no data and no weights. Folders are read
only to find the runs that are already done.
"""

from dataclasses import dataclass
from typing import Any, Literal

from attnrx.data.loading import catalogue_name
from attnrx.support.tables import aligned_table
from attnrx_lab.cluttered_digits import CLUTTERED, canvases

# The number of training images in the published datasets, by their names in the catalogue.
TRAINING_IMAGES = {
    "imagenet-1k": 1_281_167,
    "fashion_mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "food101": 75_750,
    "dtd": 3_760,
    "eurosat": 21_600,
    "imagenette": 9_469,
}
# An H100's (SXM) operations per second without sparsity, from its data sheet. Plans assume that SHARE of them is used.
PEAK = {"bf16": 989e12, "fp32": 67e12}
SHARE = 0.3
# The shortest step in seconds, because launching its kernels takes this long. When six trainings of svda/table1 ran at
# once, each step took 46 ms on an H200 (`benchmarks/svda_settings.py --jobs 6 --limit 365`, 45 epochs, 2026-11-29).
LEAST_STEP = 0.008
ASSUMED = (
    f"the time assumes {SHARE:.0%} of an H100's {PEAK['bf16'] / 1e12:.0f} TFLOP/s in bfloat16 "
    f"({PEAK['fp32'] / 1e12:.0f} in float32), at least {1000 * LEAST_STEP:g} ms a step, and data that are never waited "
    "for; measuring is not counted"
)
BACKWARD = 3  # a step costs three forward passes, because the backward pass costs two


@dataclass(frozen=True)
class Training:
    """One training in a plan. `macs` is the cost of training on one image, including the backward pass and teachers.

    `images` is the number of images per epoch, or None if this number is unknown before the data are loaded.
    """

    name: str
    epochs: int
    images: int | None
    batch_size: int
    macs: float
    precision: Literal["bf16", "fp32"] = "bf16"

    @property
    def steps(self) -> int | None:
        return None if self.images is None else self.epochs * max(1, self.images // self.batch_size)

    @property
    def operations(self) -> float | None:
        """Floating-point operations, with two per MAC."""
        return None if self.images is None else 2.0 * self.macs * self.epochs * self.images

    @property
    def hours(self) -> float | None:
        """The time on one H100 (`ASSUMED`)."""
        if self.operations is None or self.steps is None:
            return None
        return max(self.operations / (SHARE * PEAK[self.precision]), LEAST_STEP * self.steps) / 3600


@dataclass(frozen=True)
class PlannedRun:
    """One run of a recipe with its trainings. `done` is true if the folder contains the run's result."""

    name: str
    place: str
    trainings: tuple[Training, ...]
    done: bool = False


@dataclass(frozen=True)
class RecipePlan:
    """The runs that one or several recipes need, and how they deviate from the papers' protocols."""

    recipes: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    deviations: tuple[str, ...]

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The trainings of all unfinished runs. Trainings that several runs share are listed once."""
        return tuple(dict.fromkeys(each for run in self.runs if not run.done for each in run.trainings))

    @property
    def hours(self) -> float:
        """The total training time on one H100, in hours. Trainings with an unknown number of images are not counted."""
        return sum(each.hours or 0.0 for each in self.trainings)

    def to_records(self) -> dict[str, Any]:
        return {
            "kind": "attnrx plan of recipes",
            "schema": 1,
            "recipes": list(self.recipes),
            "runs": [{"name": run.name, "place": run.place, "done": run.done} for run in self.runs],
            "trainings": [
                {
                    "name": each.name,
                    "epochs": each.epochs,
                    "images": each.images,
                    "batch_size": each.batch_size,
                    "steps": each.steps,
                    "operations": each.operations,
                    "hours": each.hours,
                }
                for each in self.trainings
            ],
            "hours": self.hours,
            "assumed": ASSUMED,
            "deviations": list(self.deviations),
        }

    def __str__(self) -> str:
        """Returns the trainings as a table, followed by the total."""
        rows = [
            (each.name, each.epochs, _whole(each.images), each.batch_size, _whole(each.steps), *_sizes(each))
            for each in self.trainings
        ]
        columns = ("training", "epochs", "images", "batch", "steps", "PFLOP", "hours")
        done = sum(run.done for run in self.runs)
        parts = [aligned_table(columns, rows)] if rows else []
        parts.append(
            f"{len(self.runs)} runs, {done} of them done; {len(rows)} trainings, {self.hours:.1f} hours of one H100"
        )
        parts.append(ASSUMED)
        if any(each.images is None for each in self.trainings):
            parts.append("a dash: only the data tell how many images there are")
        return "\n".join((*parts, *self.deviations))


def training_images(dataset: str, held_out: float) -> int | None:
    """Returns the published number of training images minus the held-out images, or None if unknown."""
    if dataset == CLUTTERED:  # it has validation images, so no images are held out
        return len(canvases("train").labels)
    images = TRAINING_IMAGES.get(catalogue_name(dataset) or "")
    return None if images is None else images - round(held_out * images)


def fewer(images: int | None, most: int | None) -> int | None:
    """Returns `images`, but at most `most`. `images=None` means that it is unknown, and `most=None` means no limit."""
    return images if most is None else min(most, most if images is None else images)


def _whole(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _sizes(training: Training) -> tuple[str, str]:
    if training.operations is None or training.hours is None:
        return "-", "-"
    return f"{training.operations / 1e15:.3g}", f"{training.hours:.2f}"
