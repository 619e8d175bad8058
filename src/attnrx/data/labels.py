"""Labels of a dataset against the classes of a head: the same numbers, a map between them, or a reason to refuse."""

import re
from collections.abc import Mapping

import torch

from attnrx.data.images import ImageSet
from attnrx.data.splits import Splits
from attnrx.support.errors import DataError, UnknownName
from attnrx.support.shapes import Int, Tensor

IMAGENET_1K = 1000
# How ImageNet's classes, and their folders, are named, e.g. n01440764.
WORDNET_ID = re.compile(r"n\d{8}")


def require_labels(images: ImageSet) -> None:
    """Checks that the labels are classes of the model.

    Raises:
        DataError: The images have no labels, or those of other classes; the message is their `label_problem`.
    """
    if images.label_problem is not None:
        raise DataError(images.label_problem)


def require_labelled(labels: Int[Tensor, "images *labels"]) -> None:
    """Checks that all of these images, which have labels as a set, have one: every answer would be wrong without.

    Raises:
        DataError: Some have none.
    """
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
    return splits.changed(lambda images: images.relabelled(None, problem))


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
    by_number = {number: name for name, number in zip(splits.class_names, numbers, strict=True)}
    # Messages and reports look names up by the head's numbers; classes without images are called by their number.
    names = tuple(by_number.get(number, str(number)) for number in range(max(numbers) + 1))
    note = f"labels of its {len(numbers)} classes are mapped {how}"
    as_tensor = torch.tensor(numbers)
    return splits.changed(lambda images: images.relabelled(as_tensor), class_names=names, notes=(*splits.notes, note))
