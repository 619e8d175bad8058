"""Train, validation and test from the stored splits that a dataset has."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from attnrx.data.images import ImageSet, hold_out
from attnrx.data.pixels import Augmentation, padding_for
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError
from attnrx.support.pictures import open_picture, pixels_of
from attnrx.support.preprocessing import ImageGeometry, Normalization
from attnrx.support.shapes import Int, Tensor, UInt8

NAMES = ("train", "validation", "test")
SPLITS = {  # the names of splits in datasets, in lower case
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
MAX_CLASSES = 100_000  # ImageNet-21k has 21,841
TEST_SHARE = 0.2  # of a dataset that has neither test nor validation images
VALIDATION_IS_TEST = "no test split: the validation images are used as the test"


@dataclass(frozen=True, repr=False)
class Splits(Displayed):
    """A dataset ready for use. `augmentation` is the one to train with, None where the dataset transforms its images
    itself; `notes` list the decisions made on loading. `image_size` is a side in pixels, or (height, width); `geometry`
    is how pictures get this size, None where the pixels are given.
    """

    example = "attnrx.load_data('cifar10')"

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    channels: int
    image_size: int | tuple[int, int]
    normalization: Normalization
    augmentation: Augmentation | None
    notes: tuple[str, ...] = ()
    geometry: ImageGeometry | None = None

    def changed(self, change: Callable[[ImageSet], ImageSet], **others: Any) -> "Splits":
        """Returns the splits with `change` applied to each image set, and with other fields as given."""
        present = {name: images for name in NAMES if not isinstance(images := getattr(self, name), MissingImages)}
        return replace(self, **{name: change(images) for name, images in present.items()}, **others)

    def renormalized(self, normalization: Normalization) -> "Splits":
        """Returns the same images on another scale, for a model that was trained with other statistics."""
        return self.changed(lambda images: images.renormalized(normalization), normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry, normalization: Normalization) -> "Splits":
        """Returns the same pictures with another size, other channels or another way of fitting, and their scale."""
        shape = {"channels": geometry.channels, "image_size": geometry.side, "normalization": normalization}
        changed = self.changed(
            lambda images: images.with_geometry(geometry).renormalized(normalization), geometry=geometry, **shape
        )
        if self.augmentation is None or not self.augmentation.padding:
            return changed
        return replace(changed, augmentation=replace(self.augmentation, padding=padding_for(geometry)))


class MissingImages(ImageSet):
    """A split that the dataset lacks: every use of its images raises DataError."""

    def __init__(self, source: str, split: str, found: Iterable[str]):
        self._reason = (
            f"{source} has no {split} images (it has {', '.join(found)}): use another split (--split), or add images."
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise DataError(self._reason)

    __len__ = take = _pass = _refuse

    @property
    def fingerprint(self) -> str:
        self._refuse()


@dataclass(frozen=True, eq=False, repr=False)
class StoredImages(Displayed):
    """The encoded images of one split in storage order: what every storage format is read into.

    `sources` are their rows in the source. `content` reads the bytes of the image at a position, and `where` returns
    its file and row, for messages. `pixels` are those of images that are given decoded.
    """

    labels: Int[Tensor, "stored"]
    sources: Int[Tensor, "stored"]
    content: Callable[[int], bytes]
    where: Callable[[int], str]
    pixels: UInt8[Tensor, "stored channels height width"] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def picture(
        self, position: int, channels: int | None, alpha: str = "drop"
    ) -> UInt8[Tensor, "channels height width"]:
        """Decodes one image to grey (1 channel), RGB (3) or, with None, to the one of the two that it is.

        Raises:
            DataError: The image cannot be decoded; the message contains `where(position)`.
        """
        try:
            with open_picture(self.content(position)) as picture:
                return torch.from_numpy(pixels_of(picture, channels, alpha)).permute(2, 0, 1)
        except DataError:  # of a file that was deleted
            raise
        except Exception as error:  # Pillow's readers raise many types: SyntaxError, struct.error, EOFError
            where, reason = self.where(position), str(error) or type(error).__name__
            raise DataError(f"cannot decode the image {where}: {reason}. Repair or remove it.") from error

    def fitted(self, geometry: ImageGeometry, position: int) -> UInt8[Tensor, "channels height width"]:
        """Decodes one image and fits it as evaluation does, without randomness.

        Raises:
            DataError: The image cannot be decoded, or is too large to be resized.
        """
        picture = self.picture(position, geometry.channels, geometry.alpha)
        try:
            return geometry.fit(picture)
        except ValueError as error:
            raise DataError(f"cannot resize the image {self.where(position)}: {error}.") from error


@dataclass(frozen=True)
class Opened:
    """An opened dataset: stored images by split, class names, and notes about decisions made on opening.

    Without class names the images have no labels; those that are stored are zeros, and `remedy` is how labels can be
    given. `keys` name the training images, by which some are held out; without keys their rows do.
    """

    splits: Mapping[str, StoredImages]
    class_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    keys: Sequence[str] = ()
    remedy: str = ""


def numbered_classes(highest: int, source: str) -> tuple[str, ...]:
    """Returns the numbers 0 to `highest` as class names, for data without names.

    Raises:
        DataError: The highest label is no class number.
    """
    if highest >= MAX_CLASSES:
        raise DataError(
            f"{source} has the label {highest} and no class names, so labels count classes from 0; at most "
            f"{MAX_CLASSES:,} classes are supported. Number the classes anew, or give them names."
        )
    return tuple(str(label) for label in range(highest + 1))


def by_canonical_name(opened: Opened, source: str) -> Opened:
    """Renames the splits to train, validation and test, drops others with a note, and checks their labels.

    Raises:
        DataError: Two splits have one meaning, none is of a known name, or labels are outside the classes.
    """
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
    return replace(opened, splits=splits, notes=tuple(notes))


def assign(
    labels: Mapping[str, Int[Tensor, "_"]], source: str, share: float, seed: int, keys: Sequence[str] = ()
) -> tuple[dict[str, tuple[str, Int[Tensor, "_"]]], tuple[str, ...]]:
    """Assigns every image to train, validation or test: returns the stored split and the rows of each, and notes.

    Without a test split the validation images are the test; a split that is still missing is held out of train, the
    same share of each class: validation by `share` and `seed`, a missing test always by one seed, so that it never
    moves. Images are held out by a hash of their `keys`, else of their rows. Without a train split nothing is held out.

    Raises:
        DataError: No class of train has two images, so that none can be held out.
    """
    parts = {name: (name, torch.arange(len(numbers))) for name, numbers in labels.items()}
    notes = []
    if "test" not in parts and "validation" in parts:
        # Where there are train images, another validation split can be held out of them.
        parts["test"] = parts.pop("validation") if "train" in parts else parts["validation"]
        notes.append(VALIDATION_IS_TEST)
    # The test is taken first, so that it does not depend on the share and the seed of the validation split.
    for split, wanted, by in (("test", TEST_SHARE, 0), ("validation", share, seed)):
        if split in parts or "train" not in parts:
            continue
        rows = parts["train"][1]
        named: list[str | int] = [keys[row] if keys else row for row in map(int, rows.tolist())]
        marked = hold_out(labels["train"][rows], named, wanted, by)
        if not marked.any():
            raise DataError(
                f"{source} has no {split} split, and no class of train has two images to hold one out; add images."
            )
        parts[split], parts["train"] = ("train", rows[marked]), ("train", rows[~marked])
        notes.append(f"no {split} split: {int(marked.sum())} training images are held out, {wanted:.0%} of each class")
    return parts, tuple(notes)


def check_labels(labels: Mapping[str, Int[Tensor, "_"]], class_names: tuple[str, ...], source: str) -> None:
    """Checks that no split is empty and, where there are labels, that they are classes which occur in train.

    Raises:
        DataError: A split is empty, or a label is outside the classes or never occurs in train.
    """
    for split, numbers in labels.items():
        if not len(numbers):
            raise DataError(f"the {split} split of {source} is empty; give it images or remove it.")
        if not class_names:  # no labels
            continue
        outside = ((numbers < 0) | (numbers >= len(class_names))).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"label {int(numbers[row])} of image {row} in the {split} split of {source} is outside the "
                f"{len(class_names)} classes (0 to {len(class_names) - 1}); {len(outside)} images are like that. "
                "Correct the labels, or leave the split out if its labels are hidden."
            )
    for split, numbers in labels.items():
        # Without a train split there is nothing to compare with.
        strange = set(numbers.unique().tolist()) - set(labels.get("train", numbers).unique().tolist())
        if strange:
            raise DataError(
                f"label mismatch between the splits of {source}: class {class_names[min(strange)]!r} occurs in {split} "
                "but never in train; check that both count the same classes."
            )
