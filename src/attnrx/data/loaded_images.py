"""Splits whose rows can be read in any order: decoded once and held as uint8, or decoded batch by batch ahead of the
model where they do not fit in memory or their augmentation crops whole pictures."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from attnrx.data.images import Batch, ImageSet, Pass, RowImages
from attnrx.data.pixels import Augmentation, Draws, random_window, threads
from attnrx.data.splits import StoredImages
from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput
from attnrx.support.preprocessing import ImageGeometry, Normalization, without_waiting
from attnrx.support.shapes import Int, Tensor, UInt8

AHEAD = 2  # batches that are being decoded while the model works on another
CPU = torch.device("cpu")

Picture = Callable[[], UInt8[Tensor, "channels height width"]]


class PixelStore:
    """The decoded images of a source: held once however many splits look at them, copied once to each device.

    `sources` are the rows that the images had in the file. `decode_again` reads the same images with another geometry:
    decoded, or encoded where they do not fit in memory; None where the pixels are all there is.
    """

    def __init__(
        self,
        pixels: UInt8[Tensor, "stored channels height width"],
        labels: Int[Tensor, "stored"],
        sources: Int[Tensor, "stored"],
        decode_again: Callable[[ImageGeometry], "PixelStore | StoredImages"] | None = None,
    ):
        self.decode_again = decode_again
        # On the CPU, where rows are chosen and hashed.
        self.labels = labels
        self._copies = {CPU: (pixels, labels, sources)}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the pixels, labels and source rows on a device, copying them the first time."""
        if device not in self._copies:
            pixels, labels, sources = self._copies[CPU]
            self._copies[device] = (pixels.to(device), labels.to(device), sources.to(device))
        return self._copies[device]

    def content(self, row: int) -> bytes:
        """Returns the pixels of one image as bytes, for fingerprints."""
        return self._copies[CPU][0][row].numpy().tobytes()


@dataclass(frozen=True, eq=False, repr=False)
class MemoryImages(Displayed, RowImages):
    """Some rows of a pixel store, cropped and mirrored in batches on the device."""

    store: PixelStore
    normalization: Normalization

    def renormalized(self, normalization: Normalization) -> "MemoryImages":
        return replace(self, normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry) -> ImageSet:
        if self.store.decode_again is None:
            return self
        again = self.store.decode_again(geometry)
        if isinstance(again, PixelStore):
            return replace(self, store=again)
        return StreamedImages(self.name, again, self.rows, geometry, self.normalization)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        if order.augmentation is not None and order.augmentation.area is not None:
            raise InvalidInput(
                f"Augmentation(area={order.augmentation.area}) crops whole pictures, but {self.name} is held decoded; "
                "use padding instead."
            )
        pixels, labels, sources = self.store.on(order.device)
        for positions, draws in order.steps(len(self)):
            rows = without_waiting(self.rows[positions], order.device)
            yield Batch(order.finish(pixels[rows], draws, self.normalization), labels[rows], sources[rows])


def from_tensors(
    name: str,
    pixels: UInt8[Tensor, "images channels height width"],
    labels: Int[Tensor, "images"],
    normalization: Normalization,
) -> MemoryImages:
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
    return MemoryImages(name, PixelStore(pixels, labels, rows), rows, normalization)


@dataclass(frozen=True, eq=False)
class StreamedImages(RowImages):
    """Some rows of encoded images, which are decoded batch by batch in threads, ahead of the model."""

    store: StoredImages
    geometry: ImageGeometry
    normalization: Normalization

    def renormalized(self, normalization: Normalization) -> "StreamedImages":
        return replace(self, normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry) -> "StreamedImages":
        return replace(self, geometry=geometry)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        # A queue of batches in order, each with its decoding tasks; the first is collected once AHEAD more are
        # submitted.
        waiting: deque[tuple[Tensor, Draws | None, list[Future]]] = deque()
        pool = ThreadPoolExecutor(threads())
        try:
            for positions, draws in order.steps(len(self)):
                rows = self.rows[positions]
                crops = draws is not None and order.augmentation is not None and order.augmentation.area is not None
                windows = draws.window if draws is not None and crops else [None] * len(rows)
                decode = partial(self._decoded, order.augmentation)
                tasks = [pool.submit(decode, *pair) for pair in zip(rows.tolist(), windows, strict=True)]
                waiting.append((rows, draws, tasks))
                if len(waiting) > AHEAD:
                    yield self._collected(*waiting.popleft(), order)
            while waiting:
                yield self._collected(*waiting.popleft(), order)
        finally:  # also when the consumer stops early
            # Does not wait, because images of batches that nothing consumes may still be decoded.
            pool.shutdown(wait=False, cancel_futures=True)

    def _decoded(
        self, augmentation: Augmentation | None, row: int, window: Tensor | None
    ) -> UInt8[Tensor, "channels height width"]:
        """Returns the pixels of a picture: fitted as in evaluation or, with the numbers of a window, cropped."""
        if augmentation is None or window is None:
            return self.store.fitted(self.geometry, row)
        pixels = self.store.picture(row, self.geometry.channels, self.geometry.alpha)
        _, height, width = pixels.shape
        return random_window(pixels, augmentation.box(height, width, window), self.geometry.size)

    def _collected(self, rows: Int[Tensor, "batch"], draws: Draws | None, tasks: list[Future], order: Pass) -> Batch:
        images = torch.stack([task.result() for task in tasks])
        if order.device.type == "cuda":
            images = images.pin_memory()  # without it the copy below waits for the GPU
        images = order.finish(images.to(order.device, non_blocking=True), draws, self.normalization)
        return Batch(images, self.store.labels[rows].to(order.device), self.store.sources[rows].to(order.device))
