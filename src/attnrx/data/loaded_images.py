"""The images of a dataset that attnrx decodes: small ones are held as uint8 once they are decoded, photographs and sets
that do not fit in memory are decoded batch by batch, ahead of the model."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat

import torch

from attnrx.data.images import UNLABELLED, Augmentation, Batch, Draws, Pass, RowImages, digest, evenly_spaced
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.optional import required_module
from attnrx.support.pictures import open_picture, pixels_of
from attnrx.support.preprocessing import ImageGeometry, Normalization, without_waiting
from attnrx.support.shapes import Int, Tensor, UInt8

CHUNK = 256  # images of a step that decodes a whole set
AHEAD = 2  # batches that are being decoded while the model works on another
IN_MEMORY = 2 * 2**30  # bytes of decoded pixels of a store that are held in memory; larger ones stream


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
        if self.pixels is not None:
            return self.pixels[position]
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


@dataclass(frozen=True, eq=False, repr=False)
class LoadedImages(Displayed, RowImages):
    """Some rows of stored images, fitted to a geometry, and cropped and mirrored in batches on the device.

    `photos`: whether training crops parts of the pictures, which are then never held decoded. `numbers` are the head's
    class of every class of the dataset, -1 for no label; without them the labels are those of the dataset. `problem` is
    the reason why they fit no head.
    """

    store: StoredImages
    geometry: ImageGeometry
    normalization: Normalization
    photos: bool = False
    numbers: Int[Tensor, "classes"] | None = None
    problem: str | None = None
    can_augment = True

    @property
    def has_labels(self) -> bool:
        return self.numbers is None or bool((self.numbers != UNLABELLED).any())

    @property
    def fingerprint(self) -> str:
        """Hashes every label and the bytes of up to 64 images."""
        sampled = self.rows[evenly_spaced(len(self))].tolist()
        return digest(self.name, self.store.labels[self.rows], map(self.store.content, sampled))

    def relabelled(self, numbers: Int[Tensor, "classes"]) -> "LoadedImages":
        """Returns the same images with labels of a head: its class of every class of the dataset, -1 for no label."""
        return replace(self, numbers=numbers if self.numbers is None else numbers[self.numbers], problem=None)

    def renormalized(self, normalization: Normalization) -> "LoadedImages":
        """Returns the same images on another scale, for a model that was trained with other statistics."""
        return replace(self, normalization=normalization)

    @property
    def is_held(self) -> bool:
        """Whether decoded pixels are held in memory."""
        return not self.photos and len(self.store) * math.prod(self.geometry.shape) <= IN_MEMORY

    def _pass(self, order: Pass) -> Iterator[Batch]:
        windows = order.augmentation if order.augmentation is not None and order.augmentation.area is not None else None
        if self.is_held and windows is None:
            pixels = self._pixels.to(order.device)
            for positions, draws in order.steps(len(self)):
                images = pixels[without_waiting(positions, order.device)]
                yield self._batch(images, self.rows[positions], draws, order)
            return
        steps = ((self.rows[positions], draws) for positions, draws in order.steps(len(self)))
        for rows, draws, images in self._decoded(steps, windows):
            yield self._batch(without_waiting(images, order.device), rows, draws, order)

    @cached_property
    def _pixels(self) -> UInt8[Tensor, "images channels height width"]:
        """The pixels of all images."""
        if self.store.pixels is not None and self.store.pixels.shape[1:] == self.geometry.shape:
            return self.store.pixels[self.rows]
        pixels = torch.empty(len(self), *self.geometry.shape, dtype=torch.uint8)
        chunks = ((rows, None) for rows in self.rows.split(CHUNK))
        for block, (_, _, images) in zip(pixels.split(CHUNK), self._decoded(chunks, None), strict=True):
            block.copy_(images)
        return pixels

    def _decoded(
        self, steps: Iterable[tuple[Tensor, Draws | None]], windows: Augmentation | None
    ) -> Iterator[tuple[Int[Tensor, "batch"], Draws | None, UInt8[Tensor, "batch channels height width"]]]:
        """Yields the pixels of every step, decoded by several threads ahead of their use."""
        # In order, so that the first corrupt image is the same one in every run.
        waiting: deque[tuple[Tensor, Draws | None, Iterator[Tensor]]] = deque()
        pool = ThreadPoolExecutor(_threads())

        def collected() -> tuple[Tensor, Draws | None, Tensor]:
            rows, draws, pictures = waiting.popleft()
            return rows, draws, torch.stack([*pictures])

        try:
            for rows, draws in steps:
                crops = repeat(None) if draws is None else draws.window
                waiting.append((rows, draws, pool.map(partial(self._picture, windows), rows.tolist(), crops)))
                if len(waiting) > AHEAD:
                    yield collected()
            while waiting:
                yield collected()
        finally:  # also when the consumer stops early
            # Does not wait, because images of batches that nothing consumes may still be decoded.
            pool.shutdown(wait=False, cancel_futures=True)

    def _picture(
        self, windows: Augmentation | None, row: int, window: Tensor | None
    ) -> UInt8[Tensor, "channels height width"]:
        """Returns the pixels of a picture: fitted as in evaluation or, with the numbers of a window, cropped."""
        if windows is None or window is None:
            return self.store.fitted(self.geometry, row)
        pixels = self.store.picture(row, self.geometry.channels, self.geometry.alpha)
        _, height, width = pixels.shape
        transforms = required_module("torchvision.transforms.v2.functional", "data", "resizing images")
        return transforms.resized_crop(
            pixels, *windows.box(height, width, window), list(self.geometry.size), antialias=True
        )

    def _batch(
        self,
        images: UInt8[Tensor, "batch channels height width"],
        rows: Int[Tensor, "batch"],
        draws: Draws | None,
        order: Pass,
    ) -> Batch:
        # Augmented as bytes, which is a quarter of the memory of float32, and before normalization, so that borders are
        # black.
        if draws is not None and order.augmentation is not None:
            images = order.augmentation.apply(images, draws)
        labels = self.store.labels[rows] if self.numbers is None else self.numbers[self.store.labels[rows]]
        labels, sources = (without_waiting(each, order.device) for each in (labels, self.store.sources[rows]))
        return Batch(self.normalization.apply(images.float() / 255), labels, sources)


def _threads() -> int:
    """Returns how many images are decoded at once: decoding releases the GIL, so one thread per usable core."""
    # macOS and Windows have no sched_getaffinity; above 16 threads memory bandwidth is the limit.
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def from_tensors(
    name: str,
    pixels: UInt8[Tensor, "images channels height width"],
    labels: Int[Tensor, "images"],
    normalization: Normalization,
) -> LoadedImages:
    """Makes an image set of pixels that are in memory already.

    Args:
        name: The name of the set in messages and fingerprints.
        pixels: 8-bit pixels [images, channels, height, width].
        labels: The class number of every image.
        normalization: The scale of the batches.

    Raises:
        InvalidInput: There are no images, or not as many labels as images.
    """
    if len(pixels) != len(labels) or not len(pixels):
        raise InvalidInput(
            f"{name}: {len(pixels)} images and {len(labels)} labels; give one label for each, at least one."
        )
    rows = torch.arange(len(labels))
    store = StoredImages(labels, rows, lambda row: pixels[row].numpy().tobytes(), lambda row: f"{name}, {row}", pixels)
    geometry = ImageGeometry.of_size((pixels.shape[2], pixels.shape[3]), pixels.shape[1], "fill")  # as they are
    return LoadedImages(name, store, rows, geometry, normalization)
