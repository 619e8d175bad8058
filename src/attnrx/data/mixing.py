"""Calibration on the images of two datasets, in turns; small images are the tiles of a mosaic."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch.nn import functional as F

from attnrx.data.images import UNLABELLED, Batch, ImageSet, Pass, WrappedImages
from attnrx.data.loading import load_data
from attnrx.data.splits import Splits
from attnrx.support.arguments import COUNT, checked, instance
from attnrx.support.errors import DataError
from attnrx.support.preprocessing import ImageGeometry, Normalization
from attnrx.support.shapes import Float, Int, Tensor

# With twice, 64 pixels on 224 are 2 x 2 tiles, which carry over to other classes better than 3 x 3 or one image.
MAX_ENLARGED = 2
NO_LABELS = "some of these images are of other classes and have no labels, and this needs labels: omit the other data."


@checked(
    splits=instance("Splits, e.g. attnrx.load_data('cifar10')", Splits),
    others=instance("Splits, or what load_data takes", Splits, str, Path),
    times=COUNT,
)
def mix_data(splits: Splits, others: Splits | Path | str, times: int = 1) -> Splits:
    """Returns the splits with every training image followed by some of a second dataset, for calibration.

    What is fitted to images of few classes loses more on images of other classes (docs/results/hidden.md). Images of
    the second dataset are enlarged at most twice: smaller ones become the tiles of one image, because an image that is
    enlarged to the input of a model is blurred, and photographs are not. The dataset with too few images for the other
    one determines the number of both.

    Args:
        splits: The dataset whose training images are followed by others.
        others: The second dataset, splits or what `load_data` takes; it needs no labels.
        times: Images of the second dataset per training image.

    Raises:
        DataError: The channels differ, `others` has larger images, or fewer than `times` mosaics.
        InvalidInput: `times` is not a positive whole number.
    """
    if not isinstance(others, Splits):
        others = _loaded(others, _side(splits))
    if others.channels != splits.channels:
        raise DataError(
            f"{others.name} has images of {others.channels} channel(s), {splits.name} of {splits.channels}: mix data "
            "with the same channels."
        )
    side, others_side = _side(splits), _side(others)
    if others_side > side:
        raise DataError(
            f"{others.name} has images of {others_side} pixels, {splits.name} of {side}: load it with "
            f"image_size={side}."
        )
    tiles = -(-side // (MAX_ENLARGED * others_side))
    mosaics = Mosaics(others.train.renormalized(splits.normalization), tiles, side)
    each = min(len(splits.train), len(mosaics) // times)
    if not each:
        least = times * tiles**2
        raise DataError(
            f"{others.name} has {len(others.train)} training images: give at least {least}, of which {times} image(s) "
            f"of {tiles} x {tiles} tiles are made."
        )
    composed = f" of {tiles} x {tiles} images" if tiles > 1 else ""
    note = f"training images: {each} of {splits.name} and {times * each}{composed} of {others.name}, in turns"
    train = MixedImages(splits.train.take(each), mosaics.take(times * each), times)
    return replace(splits, train=train, notes=(*splits.notes, note))


def without_second_dataset(images: ImageSet) -> ImageSet:
    """Returns the images without those of a second dataset."""
    return images.own if isinstance(images, MixedImages) else images


def _loaded(source: Path | str, size: int) -> Splits:
    """Loads data at their own size if they are to be tiled, else at this size."""
    loaded = load_data(source)
    return loaded if MAX_ENLARGED * _side(loaded) < size else load_data(source, image_size=size)


def _side(splits: Splits) -> int:
    if not isinstance(splits.image_size, int):
        raise DataError(f"{splits.name} has images of {splits.image_size} pixels: mix data of square images.")
    return splits.image_size


@dataclass(frozen=True, eq=False)
class Mosaics(WrappedImages):
    """Images of `size` x `size` pixels, each of `tiles` x `tiles` images of another set, without labels."""

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

    def with_geometry(self, geometry: ImageGeometry) -> ImageSet:
        """Returns the set itself: the tiles make up the size."""
        return self

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
    """The images of two sets in turns: each of `own` and then `times` of `others`; the last turn need not be whole."""

    own: ImageSet
    others: ImageSet
    times: int = 1

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
        turns = -(-count // (1 + self.times))
        return replace(self, own=self.own.take(turns), others=self.others.take(count - turns))

    def part(self, process: int, processes: int, batch_size: int) -> ImageSet:
        turns = max(1, batch_size // (1 + self.times))
        own = self.own.part(process, processes, turns)
        return replace(self, own=own, others=self.others.part(process, processes, turns * self.times))

    def renormalized(self, normalization: Normalization) -> ImageSet:
        own, others = self.own.renormalized(normalization), self.others.renormalized(normalization)
        return replace(self, own=own, others=others)

    def with_geometry(self, geometry: ImageGeometry) -> ImageSet:
        return replace(self, own=self.own.with_geometry(geometry), others=self.others.with_geometry(geometry))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        # As many batches at once as have whole turns. Every process reads whole batches: the last one need not have
        # whole turns.
        period = 1 + self.times
        at_once = period // math.gcd(period, order.batch_size)
        turns = order.batch_size * at_once // period
        whole = replace(order, batch_size=turns, start=order.start // at_once, shard=(0, 1))
        own, others = self.own._pass(whole), self.others._pass(replace(whole, batch_size=turns * self.times))
        # A shuffled pass ends with the shorter set: all its batches are whole.
        pairs = zip(own, others, strict=False) if order.seed is not None else zip_longest(own, others)
        skipped = order.start % at_once
        for first, second in pairs:
            images, index = (first.images, first.index) if second is None else _in_turns(first, second, self.times)
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


def _in_turns(first: Batch, second: Batch, times: int) -> tuple[Tensor, Tensor]:
    # The turn of every image; sorting keeps `first` before `second`.
    turns = torch.cat([torch.arange(len(first)), torch.arange(len(second)) // times])
    order = turns.argsort(stable=True).to(first.index.device)
    return torch.cat([first.images, second.images])[order], torch.cat([first.index, second.index])[order]
