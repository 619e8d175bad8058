"""Counts the training images, test images and classes in a paper's datasets (SPOT, Table 6)."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from attnrx.data import Splits, load_data
from attnrx.support.progress import Log
from attnrx_lab.papers.experiment import Experiment, plain_measures
from attnrx_lab.papers.sources import TINY_CLASSES, TINY_SIDE, generated_splits


@dataclass(frozen=True)
class DatasetCounts(Experiment):
    """Counts the training images, test images and classes of one dataset, as `load_data` splits it.

    `dataset` is the location of the images. It is needed only if `load_data` cannot find the images by the name
    `subject`. Images held out for validation count as training images, because the paper does not hold out a validation
    set.
    """

    kind: ClassVar[str] = "datasets"
    knobs: ClassVar[tuple[str, ...]] = ("dataset",)
    chosen: ClassVar[tuple[str, ...]] = knobs

    subject: str
    dataset: str | None = None
    seed: int = 0
    tiny: bool = False

    def as_tiny(self) -> "DatasetCounts":
        return replace(self, tiny=True)

    def splits(self) -> Splits:
        if self.tiny:
            return generated_splits(self.subject, 3, TINY_CLASSES, TINY_SIDE)
        return load_data(self.dataset or self.subject, image_size=TINY_SIDE)  # small, because it only counts images

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        splits = self.splits()
        self.claim(folder)
        others = {split.fingerprint: len(split) for split in (splits.train, splits.validation)}
        others.pop(splits.test.fingerprint, None)  # the validation images may be the test images
        counts = {"train": sum(others.values()), "test": len(splits.test), "classes": len(splits.class_names)}
        return {
            "data": {"name": splits.name, "images": len(splits.test), "notes": list(splits.notes)},
            "rules": {"images": {"measured": plain_measures(counts)}},
        }
