"""Train, validation and test images, and their labels against the classes of a head: the same numbers, a map between
them, or a reason to refuse.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from attnrx.data.images import Augmentation, ImageSet
from attnrx.data.loaded_images import LoadedImages
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, UnknownName
from attnrx.support.preprocessing import ImageGeometry, Normalization

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

        shape = {"channels": geometry.channels, "image_size": geometry.side}
        fitted = partial(replace, geometry=geometry)
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
    # Messages and reports look names up by the head's numbers; classes without images are called by their number.
    names = tuple(by_number.get(number, str(number)) for number in range(max(numbers) + 1))
    note = f"labels of its {len(numbers)} classes are mapped {how}"
    notes = (*splits.notes, note)
    return splits.changed(lambda images: images.relabelled(torch.tensor(numbers)), class_names=names, notes=notes)
