"""The robustness experiment (SPOT, Table 5), which measures the models of Table 1 under all ImageNet-C corruptions."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.data import ImageSet, load_data
from attnrx.data.model_data import adapt_preprocessing
from attnrx.show.checks import Comparison
from attnrx.show.checks.statistics import mean_change
from attnrx.support.errors import DataError
from attnrx.support.progress import Log
from attnrx.vit.models import family_of, model_fingerprint
from attnrx_lab.checks import Robustness
from attnrx_lab.corruptions import CORRUPTIONS
from attnrx_lab.papers.experiment import (
    Measure,
    comparison_with,
    evidence_at,
    evidence_by,
    first_images,
    plain_measures,
)
from attnrx_lab.papers.spot import BATCH, DerivedExperiment, SpotExperiment, outline_for, token_price

SEVERITY = 3  # of five (SPOT, Section 7.1)


@dataclass(frozen=True)
class CorruptedExperiment(DerivedExperiment):
    """Measures one model of the SPOT experiment on corrupted test images. The model is not trained on such images.

    `corrupted` is the folder of ImageNet-C, with a folder CORRUPTION/SEVERITY for each of its 19 corruptions. If
    `corrupted` is None, the experiment itself corrupts the test images in the same ways.
    """

    kind: ClassVar[str] = "spot-corrupted"
    knobs: ClassVar[tuple[str, ...]] = (*SpotExperiment.knobs, "corrupted")

    corrupted: str | None = None

    @property
    def differences(self) -> tuple[str, ...]:
        here = f"{self.scenario}: corruptions are drawn here on the test images, not read from ImageNet-C (--corrupted)"
        return () if self.corrupted else (here,)

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Measures the SPOT run's model on every corruption. If this run does not exist, it is executed first.

        Raises:
            DataError: A corruption is missing from the folder. The method checks this before any training.
        """
        files = None if self.corrupted is None else corruption_folders(Path(self.corrupted))
        splits = self.splits()
        original, candidate = self.models(folder, log, splits)
        self.claim(folder)
        log(f"{self.name}: {len(CORRUPTIONS)} corruptions of severity {SEVERITY}")
        comparison = comparison_with(
            original, adapt_preprocessing(splits, original).test, seed=self.seed, batch_size=BATCH
        )
        comparison = replace(comparison, candidate=candidate.to(comparison.device))
        numbers = self._drawn(comparison, folder) if files is None else self._read(comparison, files, log)
        price = plain_measures(token_price(outline_for(self.model, self.subject), self.method))
        return {
            "data": {"name": splits.name, "images": len(comparison.data), "notes": list(splits.notes)},
            "model": {"fingerprint": model_fingerprint(original)},
            "rules": {self.method.name: {"paper": price, "measured": numbers}},
        }

    def _drawn(self, comparison: Comparison, folder: Path) -> dict[str, Measure]:
        check = Robustness(("all",), (SEVERITY,), images=None)
        evidence = evidence_at(folder / "evidence.json", lambda: evidence_by([check], comparison, self))
        whole = evidence.of(check.name)[-1]  # the mean over all corruptions comes last
        accuracy = plain_measures({"corrupted_accuracy": whole.details["candidate_accuracy"]})
        return {**accuracy, "corrupted_change": {"value": whole.value, "low": whole.low, "high": whole.high}}

    def _read(self, comparison: Comparison, files: Mapping[str, Path], log: Log) -> dict[str, Measure]:
        """Measures the models on the images of ImageNet-C, and averages each image's results over the corruptions."""
        accuracies, changes = [], []
        for corruption, place in files.items():
            log(f"{self.name}: {corruption}")
            images = self._images(comparison.reference, place)
            predictions = replace(comparison, data=images).predictions
            before, after = (predictions.correct(role).double() for role in ("reference", "candidate"))
            accuracies.append(100 * float(after.mean()))
            changes.append(after - before)
        change = mean_change(torch.stack(changes).mean(0), self.seed).scaled(100.0)
        measure: Measure = {"value": change.value, "low": change.low, "high": change.high}
        return {**plain_measures({"corrupted_accuracy": fmean(accuracies)}), "corrupted_change": measure}

    def _images(self, model: nn.Module, folder: Path) -> ImageSet:
        _, size, _ = family_of(model).input_shape(model)
        return first_images(adapt_preprocessing(load_data(folder, image_size=size), model).test, self.test_images)


def corruption_folders(root: Path) -> dict[str, Path]:
    """Returns the folder of each ImageNet-C corruption. Folders may be grouped by kind, e.g. noise/gaussian_noise.

    Raises:
        DataError: One of the folders is missing.
    """
    found: dict[str, Path] = {}
    for corruption in CORRUPTIONS:
        places = (root / corruption, *sorted(root.glob(f"*/{corruption}")))
        place = next((place for place in places if (place / str(SEVERITY)).is_dir()), None)
        if place is None:
            raise DataError(
                f"{root} has no folder {corruption}/{SEVERITY}, as ImageNet-C has: extract all archives of it there, "
                "or leave --corrupted out to draw the corruptions here."
            )
        found[corruption] = place / str(SEVERITY)
    return found
