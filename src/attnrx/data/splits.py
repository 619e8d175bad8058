"""Train, validation and test images: their labels, and how they are divided.

If a dataset's labels are not the class numbers of the model's head, they are mapped to the head's classes. If this is
not possible, an error says why. Images are divided into three disjoint parts: for planning and fitting, for measuring
predictions, and for verification.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

import torch

from attnrx.data.fixed_images import MAX_IMAGES, FixedImages, read_once
from attnrx.data.images import Augmentation, ImageSet, LoadedImages, round_robin
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, UnknownName
from attnrx.support.preprocessing import ImageGeometry, Normalization

NAMES = ("train", "validation", "test")
SPLITS = {  # the names that datasets use for splits, in lower case
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
# ImageNet's classes and their folders have names like n01440764.
WORDNET_ID = re.compile(r"n\d{8}")
MOST_COMPARED = 200_000  # the most stored images that a command compares by their bytes, which takes a few seconds
BATCH = 64  # images that are decoded at once
VALIDATION_IS_TEST = "no test split: the validation images are used as the test"


@dataclass(frozen=True, repr=False)
class Splits(Displayed):
    """A dataset that is ready for use: three image sets, their class names and their preprocessing.

    `augmentation` is used for training. It is None if the dataset transforms its images itself. `notes` lists the
    decisions that were made on loading. `image_size` is the side of a square in pixels, or (height, width). `geometry`
    says how pictures are resized and cropped to this size. It is None if attnrx does not resize the images itself.
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
        """Returns the splits with `change` applied to images that attnrx decodes, and with `others` as new fields."""
        decoded = {name: images for name in NAMES if isinstance(images := getattr(self, name), LoadedImages)}
        return replace(self, **{name: change(images) for name, images in decoded.items()}, **others)

    def renormalized(self, normalization: Normalization) -> "Splits":
        """Returns the same images, normalized by the mean and standard deviation that another model needs.

        Images of a user's own dataset stay the same, because its transforms normalize them.
        """
        return self.changed(lambda images: images.renormalized(normalization), normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry) -> "Splits":
        """Returns the same pictures with another size, crop or number of channels. The normalization is not adapted."""
        augmentation = self.augmentation
        if augmentation is not None and augmentation.padding:
            augmentation = replace(augmentation, padding=padding_for(geometry))

        shape = {"channels": geometry.channels, "image_size": geometry.side}
        fitted = partial(replace, geometry=geometry)
        return self.changed(fitted, geometry=geometry, augmentation=augmentation, **shape)


def padding_for(geometry: ImageGeometry) -> int:
    """Returns the padding for `Augmentation`: an eighth of the side, which is the usual 4 pixels at 32 x 32."""
    return max(geometry.size) // 8


class MissingImages(ImageSet):
    """A split that the dataset lacks. Every use of its images raises DataError."""

    def __init__(self, source: str, split: str, found: Iterable[str]):
        self._reason = (
            f"{source} has no {split} images (it has {', '.join(found)}): use another split (--split), or add images."
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise DataError(self._reason)

    __len__ = take = at = _labels = _pass = _refuse

    @property
    def fingerprint(self) -> str:
        self._refuse()


def with_missing(sets: Mapping[str, ImageSet], source: str) -> dict[str, Any]:
    """Returns all three splits. A missing split is replaced by an image set that raises an error when it is used."""
    return {name: sets[name] if name in sets else MissingImages(source, name, sets) for name in NAMES}


def fit_labels(splits: Splits, classes: int, label_map: Mapping[str, int] | None = None) -> Splits:
    """Returns the splits with the class numbers of a model's head as labels.

    Labels stay unchanged if the dataset has as many classes as the head. They also stay unchanged if the dataset has
    fewer classes and these are named by their numbers. If the classes are WordNet ids or ImageNet names and the head
    has the 1,000 classes of ImageNet-1k, labels are mapped to these classes. Other labels cannot be compared with the
    model's predictions, and functions that need them raise DataError. You can still use the images.

    Args:
        splits: The dataset.
        classes: The number of classes of the head.
        label_map: The head's class number for every class name in the dataset.

    Raises:
        DataError: The map lacks a class, or contains a number that the head does not have.
        UnknownName: The map names a class that the dataset does not have.
    """
    names = splits.class_names
    if label_map is not None:
        return _relabelled(splits, _numbers(splits, classes, label_map), "as given")
    # If classes have no names, their names are numbers, and labels may already be the head's own numbers.
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
    """Returns the ImageNet-1k index of every class, or None if a class has neither a WordNet id nor a unique name.

    Raises:
        DataError: The classes are WordNet ids, and timm, which lists them in order, is not installed.
    """
    try:
        from timm.data import ImageNetInfo
    except ModuleNotFoundError as error:
        if all(WORDNET_ID.fullmatch(name) for name in names):
            raise DataError("mapping WordNet ids to ImageNet-1k needs timm: pip install timm.") from error
        return None
    info = ImageNetInfo("imagenet-1k")
    # A name may have several indices, because it can be ambiguous. For example, both a bird and a machine in ImageNet
    # are called crane.
    indices_by_name: dict[str, list[int]] = {}
    for index in range(info.num_classes()):
        words = {word.strip().lower() for word in info.index_to_description(index).split(",")}
        for word in (*words, info.index_to_label_name(index)):
            indices_by_name.setdefault(word, []).append(index)
    # Class names in datasets often have underscores in place of spaces.
    matches = [indices_by_name.get(name.lower().replace("_", " "), []) for name in names]
    if not all(len(indices) == 1 for indices in matches):
        return None
    return tuple(indices[0] for indices in matches)


def _numbers(splits: Splits, classes: int, label_map: Mapping[str, int]) -> tuple[int, ...]:
    unknown = sorted(label_map.keys() - set(splits.class_names))
    if unknown:
        raise UnknownName(f"class of {splits.name} in the label map", unknown[0], splits.class_names)
    numbers = {name: label_map.get(name) for name in splits.class_names}
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number < classes:
            raise DataError(
                f"the label map gives {name!r} the number {number!r}; give every class of {splits.name} one of the "
                f"model's classes, 0 to {classes - 1}."
            )
    return tuple(label_map[name] for name in splits.class_names)


def _relabelled(splits: Splits, numbers: tuple[int, ...], how: str) -> Splits:
    if not all(isinstance(getattr(splits, name), LoadedImages | MissingImages) for name in NAMES):
        raise DataError("labels of a dataset of your own cannot be mapped here: let its items have the model's.")
    by_number = {number: name for name, number in zip(splits.class_names, numbers, strict=True)}
    # Messages and reports look names up by the head's numbers. A class without images gets its number as its name.
    names = tuple(by_number.get(number, str(number)) for number in range(max(numbers) + 1))
    note = f"labels of its {len(numbers)} classes are mapped {how}"
    notes = (*splits.notes, note)
    return splits.changed(lambda images: images.relabelled(torch.tensor(numbers)), class_names=names, notes=notes)


class ImageParts(NamedTuple):
    """Images for planning, for measuring predictions, and for verification. No two parts share an image."""

    planned: FixedImages
    predicted: FixedImages
    verified: FixedImages

    @property
    def notes(self) -> tuple[str, ...]:
        """How the images were read and divided."""
        return self.verified.notes

    @property
    def summary(self) -> str:
        """The number of images in each part, with their shape, type and size."""
        counts = ", ".join(f"{len(part):,} {name}" for name, part in zip(self._fields, self, strict=True))
        return f"images: {counts} on; of the last {self.verified.summary}"


def three_parts(
    splits: Splits, planned: int = MAX_IMAGES, predicted: int = MAX_IMAGES, verified: int = MAX_IMAGES
) -> ImageParts:
    """Reads the images once and divides them into parts for planning, measuring predictions, and verification.

    If the data has three splits, they are the three parts. If it has two, the first is divided into images for planning
    and for predictions, and the second is for verification. A single split is divided into all three parts: at most a
    third for planning, at most half of the rest for predictions, and the remainder for verification. `planned`,
    `predicted` and `verified` limit the number of images in each part.

    Images are compared by content, and an image that occurs several times is used once. If several splits contain an
    image, it is used for verification rather than prediction, and for prediction rather than planning.

    Raises:
        DataError: There are too few different images.
    """
    sets = _distinct_sets(splits)
    wanted = [planned, predicted, verified]
    wanted = dict(zip(sets, [sum(wanted[: 4 - len(sets)]), *wanted[4 - len(sets) :]], strict=True))
    fixed = {name: read_images(images, splits.normalization, wanted[name]) for name, images in sets.items()}
    notes = [*dict.fromkeys((*splits.notes, *(note for images in fixed.values() for note in images.notes)))]
    new = _new_positions({name: images.hashes.tolist() for name, images in fixed.items()}, notes)
    distinct = [fixed[name].at(torch.tensor(positions, dtype=torch.long)) for name, positions in new.items()]
    first, *others = (
        images if len(images) <= maximum else images.take(maximum)
        for images, maximum in zip(distinct, wanted.values(), strict=True)
    )
    # If the effort needs only a part of the last set, a note says how many of its images are used.
    name, images = next(reversed(sets.items()))
    if len(images) > len([first, *others][-1]) == wanted[name]:
        notes.append(f"{name}: {wanted[name]:,} of {len(images):,} images are used")
    if not others:
        of_plan = min(planned, len(first) // 3)
        of_predictions = min(predicted, (len(first) - of_plan) // 2)
        parts = _cut(first, of_plan, of_predictions, len(first) - of_plan - of_predictions)
    elif len(others) == 1:
        of_predictions = min(predicted, len(first) // 2)
        parts = [*_cut(first, len(first) - of_predictions, of_predictions), *others]
    else:
        parts = [first, *others]
    if not all(map(len, parts)) or (not others and len(first) < 6):
        counts = ", ".join(f"{len(part)} {name}" for name, part in zip(ImageParts._fields, parts, strict=True))
        raise DataError(
            f"{splits.name} has too few different images: {counts} on; give at least 6 images, or of every split some "
            "that are in no other."
        )
    return ImageParts(*(replace(part, notes=tuple(notes)) for part in parts))


def distinct_splits(splits: Splits) -> Splits:
    """Returns the splits without repeated stored images, and adds notes that count them.

    An image that occurs several times is used once. If two splits share an image, it stays in the later one, e.g. in
    test rather than in train. Images are compared by the bytes of their files, or by their pixels if they are already
    decoded. Image sets that attnrx does not decode itself stay unchanged. If there are more than MOST_COMPARED images
    in total, all splits stay unchanged.

    Raises:
        DataError: The splits have no images.
    """
    stored = {name: images for name, images in _distinct_sets(splits).items() if isinstance(images, LoadedImages)}
    if sum(map(len, stored.values())) > MOST_COMPARED:
        return splits
    hashes = {
        name: [blake2b(images.store.content(row), digest_size=8).digest() for row in images.rows.tolist()]
        for name, images in stored.items()
    }
    notes: list[str] = []
    new = {
        name: stored[name].at(torch.tensor(positions, dtype=torch.long))
        for name, positions in _new_positions(hashes, notes).items()
    }
    return replace(splits, **new, notes=(*splits.notes, *notes)) if notes else splits


def without_images_of(images: ImageSet, others: ImageSet) -> ImageSet:
    """Returns the images whose content does not occur in `others`. If there is no overlap, returns the set itself.

    Raises:
        DataError: All images are among `others`.
    """
    known = set(read_images(others).hashes.tolist())
    fixed = read_images(images)
    new = [position for position, each in enumerate(fixed.hashes.tolist()) if each not in known]
    if not new:
        raise DataError(
            f"all {len(fixed):,} images of {fixed.name} are also among those that predictions "
            "are measured on, and a prediction on images that a plan was chosen by is too good: give others, or call "
            "attnrx.shrink, which divides the data."
        )
    return images if len(new) == len(fixed) else fixed.at(torch.tensor(new, dtype=torch.long))


def read_images(images: ImageSet, normalization: Normalization | None = None, maximum: int = MAX_IMAGES) -> FixedImages:
    """Reads the images, or `maximum` of them, once. `FixedImages` are returned unchanged.

    Raises:
        DataError: There is no image, or one cannot be read.
    """
    if isinstance(images, FixedImages):
        return images
    chosen = images if len(images) <= maximum else images.take(maximum)
    name = chosen.fingerprint.rsplit(":", 2)[0]  # the fingerprint is name:images:hash
    found = read_once(chosen.batches(BATCH), name, normalization=normalization, total=-(-len(chosen) // BATCH))
    return replace(found, notes=(*chosen.notes, *found.notes), problem=chosen.label_problem)


def _distinct_sets(splits: Splits) -> dict[str, ImageSet]:
    """Returns the splits that have images. If validation and test are the same set, it is returned once."""
    sets: dict[str, ImageSet] = {}
    for name in NAMES:
        images = getattr(splits, name)
        if not isinstance(images, MissingImages) and not any(images is other for other in sets.values()):
            sets[name] = images
    if not sets:
        raise DataError(f"{splits.name} has no images: give at least one in every part.")
    return sets


def _new_positions(hashes: Mapping[str, Sequence[Hashable]], notes: list[str]) -> dict[str, list[int]]:
    """Returns the positions to keep in each set. Drops images that occur earlier in the same set, or in a later set.

    Adds a note for every set with dropped images.
    """
    seen = set[Hashable]()
    new: dict[str, list[int]] = {}
    # The last set is processed first, so an image of the test is not used for planning.
    for name, own in reversed(list(hashes.items())):
        positions = [position for position, each in enumerate(own) if not (each in seen or seen.add(each))]
        if len(positions) < len(own):
            where = " or ".join(("occur before", *(f"in {later}" for later in reversed(new))))
            notes.append(f"{name}: {len(own) - len(positions):,} of {len(own):,} images {where}; each is used once")
        new[name] = positions
    return {name: new[name] for name in hashes}


def _cut(images: FixedImages, *counts: int) -> list[FixedImages]:
    """Divides images into parts of these sizes, after reordering them so that each part contains all classes."""
    labels = images.store.labels
    # A dataset may be sorted by class. Without labels, images are ordered by their hashes, which is as good as random.
    order = images.hashes.argsort() if labels is None else round_robin(labels[images.rows])
    return [images.at(part) for part in order.split(list(counts))]
