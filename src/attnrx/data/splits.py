"""Train, validation and test from the stored splits that a dataset has, and their labels against the classes of a head:
the same numbers, a map between them, or a reason to refuse.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from attnrx.data.images import Augmentation, ImageSet, hold_out
from attnrx.data.loaded_images import LoadedImages, StoredImages
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, UnknownName
from attnrx.support.preprocessing import ImageGeometry, Normalization
from attnrx.support.shapes import Int, Tensor

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
IMAGENET_1K = 1000
# How ImageNet's classes, and their folders, are named, e.g. n01440764.
WORDNET_ID = re.compile(r"n\d{8}")
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

    def changed(self, change: Callable[[LoadedImages], ImageSet], **others: Any) -> "Splits":
        """Returns the splits with `change` applied to images that attnrx decodes, and with other fields as given."""
        decoded = {name: images for name in NAMES if isinstance(images := getattr(self, name), LoadedImages)}
        return replace(self, **{name: change(images) for name, images in decoded.items()}, **others)

    def renormalized(self, normalization: Normalization) -> "Splits":
        """Returns the same images on another scale, for a model that was trained with other statistics; those of a
        user's dataset stay, whose own transforms decide the scale.
        """
        return self.changed(lambda images: images.renormalized(normalization), normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry) -> "Splits":
        """Returns the same pictures with another size, other channels, whose scale is then set, or another fit."""
        augmentation = self.augmentation
        if augmentation is not None and augmentation.padding:
            augmentation = replace(augmentation, padding=padding_for(geometry))

        def fitted(images: LoadedImages) -> LoadedImages:
            return images if images.geometry is None else replace(images, geometry=geometry)  # None: given as pixels

        shape = {"channels": geometry.channels, "image_size": geometry.side}
        return self.changed(fitted, geometry=geometry, augmentation=augmentation, **shape)


def padding_for(geometry: ImageGeometry) -> int:
    """Returns the padding of `Augmentation`: an eighth of the side, the usual 4 pixels at 32 x 32."""
    return max(geometry.size) // 8


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
    """Returns the numbers 0 to `highest` as class names, for data without names; raises DataError if it is too high."""
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
    """Raises DataError for an empty split, and for a label outside the classes or of a class that train has not."""
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


def require_labels(images: ImageSet) -> None:
    """Raises DataError for images without labels, or with those of other classes, with their `label_problem`."""
    if images.label_problem is not None:
        raise DataError(images.label_problem)


def require_labelled(labels: Int[Tensor, "images *labels"]) -> None:
    """Raises DataError if some of a set's images have no label: every answer would be wrong for them."""
    # Below zero are UNLABELLED, and the numbers that other libraries have for it, such as -100.
    missing = int((labels < 0).flatten(1).any(1).sum() if labels.ndim > 1 else (labels < 0).sum())
    if missing:
        raise DataError(
            f"{missing} of {len(labels)} images have no label: give every image one, or all without labels where none "
            "are needed."
        )


def fit_labels(splits: Splits, classes: int, label_map: Mapping[str, int] | None = None) -> Splits:
    """Returns the dataset with its labels as numbers of a head.

    As many classes, or labels without names that the head has, are unchanged. A dataset whose classes are WordNet ids
    or names of ImageNet classes is mapped to a head with the 1,000 classes of ImageNet-1k. Labels of other datasets
    cannot be compared with the answers: functions that need them raise DataError; the images can be used.

    Args:
        splits: The dataset.
        classes: The number of classes of the head.
        label_map: The head's number of every class of the dataset, by name.

    Raises:
        DataError: The map lacks a class, or names one that the head does not have.
        UnknownName: The map names a class that the dataset does not have.
    """
    names = splits.class_names
    if label_map is not None:
        return _relabelled(splits, _numbers(splits, classes, label_map), "as given")
    # The names of data without names (`numbered_classes`): their labels may be the head's own numbers already.
    is_numbered = names == tuple(map(str, range(len(names))))
    if len(names) == classes or (is_numbered and len(names) < classes):
        return splits
    indices = imagenet_indices(names) if classes == IMAGENET_1K else None
    if indices is not None:
        return _relabelled(splits, indices, "to ImageNet-1k, by WordNet id or name")
    problem = (
        f"{splits.name} has {len(names)} classes ({', '.join(names[:3])} ...) and the model {classes}, so its labels "
        "cannot be compared with the answers. Give the column with the model's labels (--label-column), or the number "
        "of every class in the model (--label-map FILE, in Python adapt_preprocessing(splits, model, label_map={...}))."
    )
    return splits.changed(lambda images: replace(images, problem=problem))


def imagenet_indices(names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Returns the ImageNet-1k numbers of classes named by WordNet id or by a name that one class alone has, else None.

    Raises:
        DataError: The classes are WordNet ids and timm, which has their order, is not installed.
    """
    try:
        from timm.data import ImageNetInfo
    except ModuleNotFoundError as error:
        if all(WORDNET_ID.fullmatch(name) for name in names):
            raise DataError("mapping WordNet ids to ImageNet-1k needs timm: pip install timm.") from error
        return None
    info = ImageNetInfo("imagenet-1k")
    # Lists, because a name can be ambiguous: two classes of ImageNet are called crane, a bird and a machine.
    indices_by_name: dict[str, list[int]] = {}
    for index in range(info.num_classes()):
        words = {word.strip().lower() for word in info.index_to_description(index).split(",")}
        for word in (*words, info.index_to_label_name(index)):
            indices_by_name.setdefault(word, []).append(index)
    # Names of datasets often have underscores in place of spaces.
    matches = [indices_by_name.get(name.lower().replace("_", " "), []) for name in names]
    if not all(len(indices) == 1 for indices in matches):
        return None
    return tuple(indices[0] for indices in matches)


def _numbers(splits: Splits, classes: int, label_map: Mapping[str, int]) -> tuple[int, ...]:
    unknown = sorted(label_map.keys() - set(splits.class_names))
    if unknown:
        raise UnknownName(f"class of {splits.name} in the label map", unknown[0], splits.class_names)
    missing = [name for name in splits.class_names if name not in label_map]
    if missing:
        raise DataError(
            f"the label map has no number for {len(missing)} of {len(splits.class_names)} classes of {splits.name}, "
            f"the first is {missing[0]!r}; give one for every class."
        )
    for name, number in label_map.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < classes:
            raise DataError(
                f"the label map gives {name!r} the number {number!r}; the model has the classes 0..{classes - 1}."
            )
    return tuple(label_map[name] for name in splits.class_names)


def _relabelled(splits: Splits, numbers: tuple[int, ...], how: str) -> Splits:
    if not all(isinstance(getattr(splits, name), LoadedImages | MissingImages) for name in NAMES):
        raise DataError("labels of a dataset of your own cannot be mapped here: let its items have the model's.")
    by_number = {number: name for name, number in zip(splits.class_names, numbers, strict=True)}
    # Messages and reports look names up by the head's numbers; classes without images are called by their number.
    names = tuple(by_number.get(number, str(number)) for number in range(max(numbers) + 1))
    note = f"labels of its {len(numbers)} classes are mapped {how}"
    notes = (*splits.notes, note)
    return splits.changed(lambda images: images.relabelled(torch.tensor(numbers)), class_names=names, notes=notes)
