"""The transfer experiment (SPOT, Table 4), which trains new heads on frozen models for other datasets."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from attnrx.data import LoadedImages, Splits, load_data
from attnrx.data.images import StoredImages
from attnrx.data.model_data import adapt_preprocessing
from attnrx.support.errors import DataError
from attnrx.support.progress import Log
from attnrx.vit.models import family_of, model_fingerprint
from attnrx_lab.checks import Transfer
from attnrx_lab.checks.transfer import BATCH_SIZE
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import (
    comparison_with,
    evidence_at,
    evidence_by,
    first_images,
    measure_of,
    plain_measures,
)
from attnrx_lab.papers.plan import BACKWARD, Training, training_images
from attnrx_lab.papers.spot import BATCH, ORIGINAL, TINY, DerivedExperiment, SpotExperiment, outline_for, token_price


@dataclass(frozen=True)
class TransferExperiment(DerivedExperiment):
    """Trains new heads for the original model and one SPOT model on the dataset `target` (SPOT, Section 6.2.2).

    Each model gets a new head, and all other weights are frozen. `transfer` is the folder of the target dataset. It is
    needed only if `load_data` cannot find the dataset by its name. The heads are also trained on the target's
    validation images, because the paper does not hold out a validation set. `classes` is the published number of
    classes. The SPOT model is trained for `epochs`, and the heads for `head_epochs`. `tuned` is the folder of a SPOT
    model that is already fine-tuned. If you pass it, the images for fine-tuning are not needed.
    """

    kind: ClassVar[str] = "spot-transfer"
    knobs: ClassVar[tuple[str, ...]] = (*SpotExperiment.knobs, "transfer", "tuned")

    target: str = ""
    classes: int = 2
    transfer: str | None = None
    head_epochs: int = 80

    @property
    def scenario(self) -> str:
        """The scenario of this experiment's rows in a table, which is the name of the target dataset."""
        return self.target

    def as_tiny(self) -> Self:
        return replace(super().as_tiny(), head_epochs=2)

    def transferred(self) -> Splits:
        """Loads the target's images at the model's input size. A tiny run generates images instead.

        All images except the test images are used for training.

        Raises:
            DataError: The images are missing, or the number of classes differs from the published number.
        """
        if self.tiny:
            splits = sources.generated_splits(self.target, 3, TINY.classes, TINY.image_size)
        else:
            outline = outline_for(self.model, self.subject)
            _, size, _ = family_of(outline).input_shape(outline)
            splits = load_data(self.transfer or self.target, image_size=size, validation_share=0)
            if (found := len(splits.class_names)) != self.classes:
                raise DataError(
                    f"{self.transfer or self.target} has {found} classes and {self.target} has {self.classes}: give "
                    f"the images of {self.target} as its authors publish them (--only {self.target} --transfer FOLDER)."
                )
        return replace(splits, train=joined(splits), test=first_images(splits.test, self.test_images))

    def trainings(self) -> tuple[Training, ...]:
        if self.tiny:
            return ()
        outline, images = outline_for(self.model, self.subject), training_images(self.transfer or self.target, 0.0)
        macs = 2 * BACKWARD * family_of(outline).specs(outline)[0].width * self.classes
        name = f"{self.target}, the new heads of both models, seed {self.seed}"
        return (*super().trainings(), Training(name, self.head_epochs, images, BATCH_SIZE, macs, "fp32"))

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Trains a new head for each of the two frozen models on the target's images, and measures both accuracies."""
        splits = self.transferred()  # loaded first, so that nothing is trained if they are missing
        original, candidate = self.models(folder, log)
        adapted = adapt_preprocessing(splits, original)
        self.claim(folder)
        log(f"{self.name}: new heads on {len(adapted.train):,} images of {len(splits.class_names)} classes")
        comparison = comparison_with(original, adapted.test, seed=self.seed, batch_size=BATCH)
        comparison = replace(comparison, candidate=candidate.to(comparison.device))
        check = Transfer(adapted.train, len(splits.class_names), seeds=(self.seed,), epochs=self.head_epochs)
        evidence = evidence_at(folder / "evidence.json", lambda: evidence_by([check], comparison, self))
        before, after, change = (measure_of(finding) for finding in evidence.of(check.name))
        log(f"{self.name}: top-1 {after['value']:.2f} %")
        outline = outline_for(self.model, self.subject)
        unchanged = plain_measures({"accuracy_change": 0.0})
        return {
            "data": {"name": splits.name, "images": len(adapted.test), "notes": list(splits.notes)},
            "model": {"fingerprint": model_fingerprint(original)},
            "rules": {
                ORIGINAL.name: {
                    "paper": plain_measures(token_price(outline, ORIGINAL)),
                    "measured": {"accuracy": before, **unchanged},
                },
                self.method.name: {
                    "paper": plain_measures(token_price(outline, self.method)),
                    "measured": {"accuracy": after, "accuracy_change": change},
                },
            },
        }


def joined(splits: Splits) -> LoadedImages:
    """Returns one dataset with the training images and, if there are any, the separate validation images."""
    first, second = splits.train, splits.validation
    assert isinstance(first, LoadedImages)  # all images here come from `load_data`
    if not isinstance(second, LoadedImages):
        return first
    count, pixels = len(first), (first.store.pixels, second.store.pixels)

    def part(position: int) -> tuple[StoredImages, int]:
        images, at = (first, position) if position < count else (second, position - count)
        return images.store, int(images.rows[at])

    def content(position: int) -> bytes:
        store, row = part(position)
        return store.content(row)

    def where(position: int) -> str:
        store, row = part(position)
        return store.where(row)

    rows = torch.arange(count + len(second))
    labels = torch.cat([images.store.labels[images.rows] for images in (first, second)])
    both = None
    if pixels[0] is not None and pixels[1] is not None:
        both = torch.cat([pixels[0][first.rows], pixels[1][second.rows]])
    return replace(first, store=StoredImages(labels, rows, content, where, both), rows=rows)
