"""Division of a dataset into disjoint images: to plan and fit on, to measure predictions on, and to verify on."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

import torch

from attnrx.data.fixed_images import MAX_IMAGES, FixedImages, read_once
from attnrx.data.images import ImageSet, round_robin
from attnrx.data.loaded_images import LoadedImages
from attnrx.data.splits import NAMES, MissingImages, Splits
from attnrx.support.errors import DataError
from attnrx.support.preprocessing import Normalization

MOST_COMPARED = 200_000  # stored images whose bytes a command reads to find repeated ones, in seconds
BATCH = 64  # images that are decoded at once


class Parts(NamedTuple):
    """Images by their use; no two parts have images of the same pixels."""

    planned: FixedImages
    predicted: FixedImages
    verified: FixedImages

    @property
    def notes(self) -> tuple[str, ...]:
        """How the images were read and divided."""
        return self.verified.notes

    @property
    def summary(self) -> str:
        """The number of images of each part, with their shape, type and size."""
        counts = ", ".join(f"{len(part):,} {name}" for name, part in zip(self._fields, self, strict=True))
        return f"images: {counts} on; of the last {self.verified.summary}"


def three_parts(
    splits: Splits, planned: int = MAX_IMAGES, predicted: int = MAX_IMAGES, verified: int = MAX_IMAGES
) -> Parts:
    """Reads the images once and divides them: to plan on, to measure predictions on, and to verify on.

    Of three splits each is a part, of two the first is divided, and of one all images are: a third at most to plan on
    and to predict on, and the others to verify on. At most so many images are used of each part. Images are compared by
    content: one that occurs several times is used once, to verify on rather than to predict on, and to predict on
    rather than to plan on.

    Raises:
        DataError: There are too few different images.
    """
    sets = _distinct_sets(splits)
    wanted = [planned, predicted, verified]
    wanted = [sum(wanted[: 4 - len(sets)]), *wanted[4 - len(sets) :]]
    fixed = {
        name: read_images(images, splits.normalization, maximum)
        for (name, images), maximum in zip(sets.items(), wanted, strict=True)
    }
    notes = [*dict.fromkeys(note for images in fixed.values() for note in images.notes)]
    new = _new_positions({name: images.hashes.tolist() for name, images in fixed.items()}, notes)
    distinct = {name: images.at(torch.tensor(new[name], dtype=torch.long)) for name, images in fixed.items()}
    different = {
        name: images if len(images) <= maximum else images.take(maximum)
        for (name, images), maximum in zip(distinct.items(), wanted, strict=True)
    }
    # Of the other sets as many are used as an effort needs.
    name, images = next(reversed(sets.items()))
    if len(images) > len(different[name]) == wanted[-1]:
        notes.append(f"{name}: {wanted[-1]:,} of {len(images):,} images are used")
    *others, last = different.values()
    if not others:
        if len(last) < 6:
            raise DataError(f"{len(last)} different images: give at least 6, which are divided into three parts.")
        first = min(planned, len(last) // 3)
        second = min(predicted, (len(last) - first) // 2)
        parts = _cut(last, first, second, len(last) - first - second)
    elif len(others) == 1:
        if len(others[0]) < 2:
            raise DataError(
                f"{splits.name} has {len(others[0])} images to plan on that are not among those to verify on; give at "
                "least 2."
            )
        second = min(predicted, len(others[0]) // 2)
        parts = [*_cut(others[0], len(others[0]) - second, second), last]
    else:
        parts = [*others, last]
    for name, part in zip(Parts._fields, parts, strict=True):
        if not len(part):
            raise DataError(f"{splits.name} has no images left for the part that is {name}: all occur in other splits.")
    return Parts(*(replace(part, notes=tuple(notes)) for part in parts))


def distinct_splits(splits: Splits) -> Splits:
    """Returns the splits without stored images that occur before in the same split, or in a later one, with notes.

    As in `three_parts`, an image that occurs several times is used once, to verify on rather than to fit on. Images are
    compared by the bytes of their files, or of their pixels where they are held decoded; sets that cannot be read by
    row are left as they are, and so are those of more than MOST_COMPARED images in all.

    Raises:
        DataError: No split has images.
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
        name: replace(stored[name], rows=stored[name].rows[torch.tensor(positions, dtype=torch.long)])
        for name, positions in _new_positions(hashes, notes).items()
    }
    return replace(splits, **new, notes=(*splits.notes, *notes)) if notes else splits


def without_images_of(images: ImageSet, others: ImageSet) -> ImageSet:
    """Returns the images that are not among the others, compared by content; the set itself if all are.

    Raises:
        DataError: All are among the others.
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
    """Returns the images, or `maximum` of them, read once; those that are fixed already are returned unchanged.

    Raises:
        DataError: There is no image, or one cannot be read.
    """
    if isinstance(images, FixedImages):
        return images
    chosen = images if len(images) <= maximum else images.take(maximum)
    name = chosen.fingerprint.rsplit(":", 2)[0]  # of name:images:hash
    batches, problem = chosen.batches(BATCH), chosen.label_problem
    found = read_once(batches, name, normalization=normalization, total=-(-len(chosen) // BATCH), problem=problem)
    return replace(found, notes=(*chosen.notes, *found.notes))


def _distinct_sets(splits: Splits) -> dict[str, ImageSet]:
    """Returns the splits that the data have; without a test split the validation images are both (`splits_for`)."""
    sets: dict[str, ImageSet] = {}
    for name in NAMES:
        images = getattr(splits, name)
        if not isinstance(images, MissingImages) and not any(images is other for other in sets.values()):
            sets[name] = images
    if not sets:
        raise DataError(f"{splits.name} has no images.")
    return sets


def _new_positions(hashes: Mapping[str, Sequence[Hashable]], notes: list[str]) -> dict[str, list[int]]:
    """Returns for each set the positions of images that occur neither before in it nor in a later set; adds notes."""
    seen = set[Hashable]()
    new: dict[str, list[int]] = {}
    # From the last: an image of the test is not planned on.
    for name, own in reversed(list(hashes.items())):
        positions = [position for position, each in enumerate(own) if not (each in seen or seen.add(each))]
        if len(positions) < len(own):
            where = " or ".join(("occur before", *(f"in {later}" for later in reversed(new))))
            notes.append(f"{name}: {len(own) - len(positions):,} of {len(own):,} images {where}; each is used once")
        new[name] = positions
    return {name: new[name] for name in hashes}


def _cut(images: FixedImages, *counts: int) -> list[FixedImages]:
    """Returns consecutive parts of so many images, after ordering them so that each part is of all classes."""
    labels = images.store.labels
    # A dataset may be sorted by class: without labels the order is that of the hashes, which is as good as random.
    order = images.hashes.argsort() if labels is None else round_robin(labels[images.rows])
    return [images.at(part) for part in order.split(list(counts))]
