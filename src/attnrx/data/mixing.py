"""Calibration on the images of two datasets, in turns; small images are the tiles of a mosaic."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch.nn import functional as F

from attnrx.data.images import Batch, ImageSet, Pass
from attnrx.data.labels import UNLABELLED
from attnrx.data.loading import load_data
from attnrx.data.pixels import Normalization
from attnrx.data.splits import Splits
from attnrx.errors import DataError
from attnrx.shapes import Float, Int, Tensor

# With twice, 64 pixels on 224 are 2 x 2 tiles, which carry over to other classes better than 3 x 3 or one image.
MOST_ENLARGED = 2
NO_LABELS = "half of these images are of other classes and have no labels, and this needs labels: omit the other data."


def mix_data(splits: Splits, others: Splits | Path | str) -> Splits:
    """Returns the splits with every second training image from the training images of `others`, for calibration.

    What is fitted to images of few classes loses more on images of other classes (docs/results/hidden.md). `others`,
    splits or what `load_data` takes, needs no labels. Its images are enlarged at most twice: smaller ones become the
    tiles of one image, because an image that is enlarged to the input of a model is blurred, and photographs are not.
    Both datasets contribute as many images as the smaller one has.

    Raises:
        DataError: The channels differ, `others` has larger images, or fewer than one mosaic.
    """
    if not isinstance(others, Splits):
        others = _loaded(others, splits.image_size)
    if others.channels != splits.channels:
        raise DataError(
            f"{others.name} has images of {others.channels} channel(s), {splits.name} of {splits.channels}: mix data "
            "with the same channels."
        )
    if others.image_size > splits.image_size:
        raise DataError(
            f"{others.name} has images of {others.image_size} pixels, {splits.name} of {splits.image_size}: load it "
            f"with image_size={splits.image_size}."
        )
    tiles = -(-splits.image_size // (MOST_ENLARGED * others.image_size))
    mosaics = Mosaics(others.train.renormalized(splits.normalization), tiles, splits.image_size)
    each = min(len(splits.train), len(mosaics))
    if not each:
        raise DataError(f"{others.name} has {len(others.train)} training images: give at least {tiles**2}, one mosaic.")
    composed = f" of {tiles} x {tiles} images" if tiles > 1 else ""
    note = f"training images: {each} of {splits.name} and {each}{composed} of {others.name}, in turns"
    train = MixedImages(splits.train.take(each), mosaics.take(each))
    return replace(splits, train=train, notes=(*splits.notes, note))


def own_images(images: ImageSet) -> ImageSet:
    """Returns the images without those of a second dataset."""
    return images.own if isinstance(images, MixedImages) else images


def _loaded(source: Path | str, size: int) -> Splits:
    """Loads data at their own size if they are to be tiled, else at this size."""
    loaded = load_data(source)
    return loaded if MOST_ENLARGED * loaded.image_size < size else load_data(source, image_size=size)


@dataclass(frozen=True, eq=False)
class Mosaics(ImageSet):
    """Images of `size` x `size` pixels, each of `tiles` x `tiles` images of another set, without labels."""

    source: ImageSet
    tiles: int
    size: int

    @property
    def has_labels(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.source) // self.tiles**2

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint}/{self.tiles}x{self.tiles}"

    def take(self, count: int) -> ImageSet:
        return replace(self, source=self.source.take(count * self.tiles**2))

    def part(self, process: int, processes: int, batch_size: int) -> ImageSet:
        return replace(self, source=self.source.part(process, processes, batch_size * self.tiles**2))

    def renormalized(self, normalization: Normalization) -> ImageSet:
        return replace(self, source=self.source.renormalized(normalization))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        each = self.tiles**2
        # Every process reads whole batches: its share of the images of the last one could end within a mosaic.
        for batch in self.source._pass(replace(order, batch_size=order.batch_size * each, shard=(0, 1))):
            # The last batch may have images left that are no whole mosaic.
            if count := len(batch) // each:
                images = self._composed(batch.images[: count * each])
                yield from _own_share(order, images, batch.index[:count])

    def _composed(self, images: Float[Tensor, "tiles channels _ _"]) -> Float[Tensor, "batch channels size size"]:
        side = -(-self.size // self.tiles)  # rounded up: the last row and column are cut
        # Bicubic, which blurs less; its overshoots are cut.
        resized = F.interpolate(images, (side, side), mode="bicubic", antialias=True)
        resized = resized.clamp(images.amin(), images.amax())
        # Not of consecutive images, which are often of similar classes.
        grid = resized.unflatten(0, (self.tiles, self.tiles, -1)).permute(2, 3, 0, 4, 1, 5)
        return grid.flatten(4).flatten(2, 3)[..., : self.size, : self.size]


@dataclass(frozen=True, eq=False)
class MixedImages(ImageSet):
    """The images of two sets in turns, `own` first; both have as many, or `own` one more."""

    own: ImageSet
    others: ImageSet

    @property
    def has_labels(self) -> bool:
        return False

    @property
    def label_problem(self) -> str | None:
        return NO_LABELS

    def __len__(self) -> int:
        return len(self.own) + len(self.others)

    @property
    def fingerprint(self) -> str:
        return f"{self.own.fingerprint}+{self.others.fingerprint}"

    def take(self, count: int) -> ImageSet:
        if count == 1:
            return self.own.take(1)
        return replace(self, own=self.own.take(count - count // 2), others=self.others.take(count // 2))

    def part(self, process: int, processes: int, batch_size: int) -> ImageSet:
        half = max(1, batch_size // 2)
        return MixedImages(self.own.part(process, processes, half), self.others.part(process, processes, half))

    def renormalized(self, normalization: Normalization) -> ImageSet:
        return MixedImages(self.own.renormalized(normalization), self.others.renormalized(normalization))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        # An odd batch has no halves, so that two are read at once. Every process reads whole batches: the last one need
        # not have as many images of both sets.
        at_once = 1 + order.batch_size % 2
        size = order.batch_size * at_once // 2
        halves = replace(order, batch_size=size, start=order.start // at_once, shard=(0, 1))
        own, others = self.own._pass(halves), self.others._pass(halves)
        # A shuffled pass ends with the shorter set: all its batches are whole.
        pairs = zip(own, others, strict=False) if order.seed is not None else zip_longest(own, others)
        skipped = order.start % at_once
        for first, second in pairs:
            images, index = (first.images, first.index) if second is None else _in_turns(first, second)
            for start in range(skipped * order.batch_size, len(index), order.batch_size):
                rows = slice(start, start + order.batch_size)
                yield from _own_share(order, images[rows], index[rows])
            skipped = 0


def _own_share(
    order: Pass, images: Float[Tensor, "batch channels height width"], index: Int[Tensor, "batch"]
) -> Iterator[Batch]:
    """Yields the images of a batch that this process takes, without labels; nothing if it takes none."""
    share = order.share(len(index))
    if share.start < share.stop:
        yield Batch(images[share], torch.full_like(index[share], UNLABELLED), index[share])


def _in_turns(first: Batch, second: Batch) -> tuple[Tensor, Tensor]:
    # The place of an image within its half, twice; sorting keeps `first` before `second`.
    places = torch.cat([torch.arange(len(first)), torch.arange(len(second))])
    order = places.argsort(stable=True).to(first.index.device)
    return torch.cat([first.images, second.images])[order], torch.cat([first.index, second.index])[order]
