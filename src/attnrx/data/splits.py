"""Train, validation and test from the splits that a dataset has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from attnrx.data.augmentation import Augmentation
from attnrx.data.holdout import held_out
from attnrx.data.images import Batch, ImageSet
from attnrx.data.normalization import Normalization
from attnrx.data.passes import Pass
from attnrx.data.stored import SPLITS, Opened, StoredImages
from attnrx.errors import DataError
from attnrx.shapes import Int, Tensor

TEST_SHARE = 0.2  # of a dataset that has neither test nor validation images
VALIDATION_IS_TEST = "no test split: the validation images are used as the test"


@dataclass(frozen=True)
class Splits:
    """A dataset ready for use. `augmentation` is the one to train with, None where the dataset transforms its images
    itself; `notes` list the decisions made on loading.
    """

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    normalization: Normalization
    augmentation: Augmentation | None
    notes: tuple[str, ...] = ()

    def renormalized(self, normalization: Normalization) -> "Splits":
        """Returns the same images on another scale, for a model that was trained with other statistics."""
        return replace(
            self,
            train=self.train.renormalized(normalization),
            validation=self.validation.renormalized(normalization),
            test=self.test.renormalized(normalization),
            normalization=normalization,
        )


class MissingImages(ImageSet):
    """A split that the dataset lacks: every use of its images raises DataError."""

    def __init__(self, source: str, split: str, found: Iterable[str]):
        self._reason = (
            f"{source} has no {split} images (it has {', '.join(found)}): use another split (--split), or add images."
        )

    def __len__(self) -> int:
        raise DataError(self._reason)

    @property
    def fingerprint(self) -> str:
        """Raises."""
        raise DataError(self._reason)

    def take(self, count: int) -> ImageSet:
        """Raises."""
        raise DataError(self._reason)

    def part(self, process: int, processes: int, batch_size: int) -> ImageSet:
        """Raises."""
        raise DataError(self._reason)

    def renormalized(self, normalization: Normalization) -> ImageSet:
        """Returns itself."""
        return self

    def _pass(self, order: Pass) -> Iterator[Batch]:
        raise DataError(self._reason)


@dataclass(frozen=True)
class SplitRows:
    """Some rows of one stored split."""

    stored: str
    rows: Int[Tensor, "images"]


@dataclass(frozen=True)
class Assignment:
    """Which stored images make up train, validation and test, and what had to be decided for that."""

    parts: Mapping[str, SplitRows]
    notes: tuple[str, ...]


def by_canonical_name(opened: Opened, source: str) -> Opened:
    """Renames the splits to train, validation and test, drops others with a note, and checks their labels."""
    splits: dict[str, StoredImages] = {}
    notes = list(opened.notes)
    for stored, records in opened.splits.items():
        name = SPLITS.get(stored.lower())
        if name is None:
            notes.append(f"the split {stored!r} is neither train, validation nor test and is not used")
        elif name in splits:
            raise DataError(f"{source} has two {name} splits, one of them called {stored!r}; rename or remove one.")
        else:
            splits[name] = records
    if not splits:
        raise DataError(
            f"{source} has no train, validation or test split (it has {', '.join(map(repr, opened.splits))}); "
            "rename one."
        )
    check_labels({name: records.labels for name, records in splits.items()}, opened.class_names, source)
    return Opened(splits, opened.class_names, tuple(notes))


def assign(labels: Mapping[str, Int[Tensor, "_"]], source: str, share: float, seed: int) -> Assignment:
    """Assigns every image to train, validation or test.

    Without a test split the validation images are the test; a split that is still missing is held out of train, the
    same share of each class: validation by `share` and `seed`, a missing test always by one seed, so that it never
    moves. Without a train split nothing is held out.
    """
    parts = {name: SplitRows(name, torch.arange(len(numbers))) for name, numbers in labels.items()}
    notes: list[str] = []
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts["validation"] if "train" not in parts else parts.pop("validation")
        notes.append(VALIDATION_IS_TEST)
    if "train" not in parts:
        return Assignment(parts, tuple(notes))
    for split, wanted, by in (("test", TEST_SHARE, 0), ("validation", share, seed)):
        if split in parts:
            continue
        train = parts["train"]
        marked = held_out(labels["train"][train.rows], train.rows.tolist(), wanted, by)
        if not marked.any():
            raise DataError(
                f"{source} has no {split} split, and no class of train has two images to hold one out; add images."
            )
        parts[split] = SplitRows("train", train.rows[marked])
        parts["train"] = SplitRows("train", train.rows[~marked])
        notes.append(f"no {split} split: {int(marked.sum())} training images are held out, {wanted:.0%} of each class")
    return Assignment(parts, tuple(notes))


def check_labels(labels: Mapping[str, Int[Tensor, "_"]], class_names: tuple[str, ...], source: str) -> None:
    """Refuses empty splits, labels outside the classes, and classes that only occur outside of train."""
    for split, numbers in labels.items():
        if not len(numbers):
            raise DataError(f"the {split} split of {source} is empty; give it images or remove it.")
        outside = ((numbers < 0) | (numbers >= len(class_names))).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"label {int(numbers[row])} of image {row} in the {split} split of {source} is outside the "
                f"{len(class_names)} classes (0 to {len(class_names) - 1}); {len(outside)} images are like that. "
                "Correct the labels, or leave the split out if its labels are hidden."
            )
    if "train" not in labels:
        return
    trained = set(labels["train"].unique().tolist())
    for split, numbers in labels.items():
        strange = sorted(set(numbers.unique().tolist()) - trained)
        if strange:
            raise DataError(
                f"label mismatch between the splits of {source}: class {class_names[strange[0]]!r} occurs in {split} "
                "but never in train; check that both count the same classes."
            )
