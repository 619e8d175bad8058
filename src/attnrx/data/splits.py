"""From the splits a dataset happens to have to the three that an experiment needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from attnrx.data.augmentation import Augmentation
from attnrx.data.holdout import held_out
from attnrx.data.images import ImageSet
from attnrx.data.normalization import Normalization
from attnrx.data.readers.reader import SPLITS
from attnrx.errors import DataError
from attnrx.shapes import Int, Tensor

TEST_SHARE = 0.2  # of a dataset that has neither test nor validation images


@dataclass(frozen=True)
class Splits:
    """A dataset ready for use. `augmentation` is the one to train with; `notes` say what had to be decided."""

    name: str
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    normalization: Normalization
    augmentation: Augmentation
    notes: tuple[str, ...] = ()

    def renormalized(self, normalization: Normalization) -> "Splits":
        """Gives the same images on another scale, for a model that was trained with other statistics."""
        return replace(
            self,
            train=self.train.renormalized(normalization),
            validation=self.validation.renormalized(normalization),
            test=self.test.renormalized(normalization),
            normalization=normalization,
        )


@dataclass(frozen=True)
class Part:
    """Some rows of one stored split."""

    stored: str
    rows: Int[Tensor, "images"]


@dataclass
class Assignment:
    """Which stored images make up train, validation and test."""

    parts: dict[str, Part]
    notes: list[str] = field(default_factory=list)


def assign(labels: Mapping[str, Int[Tensor, "_"]], place: str, share: float, seed: int) -> Assignment:
    """Gives every image to train, validation or test.

    Without a test split the validation images are the test; what is then still missing is held out of train, the same
    share of each class: validation by `share` and `seed`, a missing test always by the same seed, so that it never moves.
    """
    if not 0 < share < 1:
        raise DataError(f"validation_share={share}: it is a share of the training images and must lie between 0 and 1.")
    assignment = _by_name(labels, place)
    parts, notes = assignment.parts, assignment.notes
    if "train" not in parts:
        raise DataError(
            f"{place} has no train split (it has {', '.join(map(repr, labels))}); rename one, or give the other files too."
        )
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
        notes.append("no test split: the validation images are used as the test")
    if "test" not in parts:
        _hold_out("test", TEST_SHARE, assignment, labels, seed=0)
    if "validation" not in parts:
        _hold_out("validation", share, assignment, labels, seed=seed)
    return assignment


def check_labels(labels: Mapping[str, Int[Tensor, "_"]], class_names: tuple[str, ...], place: str) -> None:
    """Refuses empty splits, labels outside the classes, and classes that only occur outside of train."""
    for split, numbers in labels.items():
        if not len(numbers):
            raise DataError(f"the {split} split of {place} is empty; give it images or remove it.")
        outside = ((numbers < 0) | (numbers >= len(class_names))).nonzero().flatten()
        if len(outside):
            row = int(outside[0])
            raise DataError(
                f"label {int(numbers[row])} of image {row} in the {split} split of {place} is outside the "
                f"{len(class_names)} classes (0 to {len(class_names) - 1}); {len(outside)} images are like that. "
                "Correct the labels, or leave the split out if its labels are hidden."
            )
    train = labels.get("train")
    for split, numbers in labels.items():
        strange = sorted(set(numbers.unique().tolist()) - set(train.unique().tolist())) if train is not None else []
        if strange:
            raise DataError(
                f"label mismatch between the splits of {place}: class {class_names[strange[0]]!r} occurs in {split} but "
                "never in train; check that both count the same classes."
            )


def canonical(labels: Mapping[str, object], place: str) -> tuple[dict[str, str], list[str]]:
    """Maps train, validation and test to the names a dataset has for them, and notes the splits that are none of them."""
    names: dict[str, str] = {}
    notes: list[str] = []
    for stored in labels:
        name = SPLITS.get(stored.lower())
        if name is None:
            notes.append(f"the split {stored!r} is neither train, validation nor test and is not used")
        elif name in names:
            raise DataError(f"{place} has two {name} splits, {names[name]!r} and {stored!r}; rename or remove one.")
        else:
            names[name] = stored
    return names, notes


def _by_name(labels: Mapping[str, Tensor], place: str) -> Assignment:
    names, notes = canonical(labels, place)
    return Assignment({name: Part(stored, torch.arange(len(labels[stored]))) for name, stored in names.items()}, notes)


def _hold_out(split: str, share: float, assignment: Assignment, labels: Mapping[str, Tensor], seed: int) -> None:
    train = assignment.parts["train"]
    marked = held_out(labels[train.stored][train.rows], train.rows.tolist(), share, seed)
    if not marked.any():
        raise DataError(
            f"no {split} split, and no class has the two images that holding one out of train needs; add images."
        )
    assignment.parts[split] = Part(train.stored, train.rows[marked])
    assignment.parts["train"] = Part(train.stored, train.rows[~marked])
    assignment.notes.append(
        f"no {split} split: {int(marked.sum())} of the training images ({share:.0%} of each class) are held out"
    )
