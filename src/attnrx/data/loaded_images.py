"""Splits whose rows can be read in any order: decoded once and held as uint8, or decoded batch by batch ahead of the
model where they do not fit in memory or their augmentation crops whole pictures."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from attnrx.data.images import Batch, ImageSet, Pass, RowImages
from attnrx.data.pixels import Augmentation, CorruptImages, Draws, random_window, threads
from attnrx.data.splits import StoredImages
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, InvalidInput
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
        """

        Returns the pixels of one image as bytes, for fingerprints.
        """
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


@dataclass(frozen=True)
class Work:
    """One batch before decoding."""

    pictures: list[Picture]
    labels: Int[Tensor, "batch"]
    index: Int[Tensor, "batch"]
    draws: Draws | None


@dataclass(frozen=True, eq=False)
class StreamedImages(RowImages):
    """Some rows of encoded images, which are decoded batch by batch, ahead of the model.

    Every split has its own list of `corrupt` images.
    """

    store: StoredImages
    geometry: ImageGeometry
    normalization: Normalization
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Messages of the images that could not be decoded so far."""
        return tuple(self.corrupt.found)

    def renormalized(self, normalization: Normalization) -> "StreamedImages":
        return replace(self, normalization=normalization)

    def with_geometry(self, geometry: ImageGeometry) -> "StreamedImages":
        return replace(self, geometry=geometry)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        return self._decoded(self._works(order), order)

    def _works(self, order: Pass) -> Iterator[Work]:
        for positions, draws in order.steps(len(self)):
            rows, geometry = self.rows[positions], self.geometry
            pictures = [partial(self.store.picture, row, geometry.channels, geometry.alpha) for row in rows.tolist()]
            yield Work(pictures, self.store.labels[rows], self.store.sources[rows], draws)

    def _decoded(self, works: Iterable[Work], order: Pass) -> Iterator[Batch]:
        """Decodes with a pool of threads, keeping the order; images that cannot be decoded are skipped or raised."""
        # A queue of batches in order, each a list of decoding tasks; the first is collected once AHEAD more are
        # submitted.
        waiting: deque[tuple[Work, list[Future]]] = deque()
        pool = ThreadPoolExecutor(threads())
        try:
            for work in works:
                waiting.append((work, self._submit(pool, work, order.augmentation)))
                if len(waiting) > AHEAD:
                    yield self._collect(*waiting.popleft(), order)
            while waiting:
                yield self._collect(*waiting.popleft(), order)
        finally:  # also when the consumer stops early
            # Does not wait, because images of batches that nothing consumes may still be decoded.
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Work, augmentation: Augmentation | None) -> list[Future]:
        if work.draws is None or augmentation is None or augmentation.area is None:
            return [pool.submit(self._fitted, picture) for picture in work.pictures]

        def window(picture: Picture, numbers: Tensor) -> Tensor:
            pixels = picture()
            return random_window(
                pixels, augmentation.box(pixels.shape[1], pixels.shape[2], numbers), self.geometry.size
            )

        return [pool.submit(window, *pair) for pair in zip(work.pictures, work.draws.window, strict=True)]

    def _fitted(self, picture: Picture) -> UInt8[Tensor, "channels height width"]:
        pixels = picture()
        try:
            return self.geometry.fit(pixels)
        except ValueError as error:
            raise DataError(f"a picture cannot be resized: {error}.") from error

    def _collect(self, work: Work, tasks: list[Future], order: Pass) -> Batch:
        pixels, positions = [], []
        for position, task in enumerate(tasks):
            try:
                pixels.append(task.result())
                positions.append(position)
            except DataError as error:
                self.corrupt.report(error)
        if not pixels:
            raise DataError(
                f"none of the {len(tasks)} images of a batch can be decoded; the first: "
                # The last messages are those of this batch, one for each of its images.
                f"{self.corrupt.found[-len(tasks)]}"
            )
        images = without_waiting(torch.stack(pixels), order.device)
        # Random numbers belong to positions, so a skipped image does not change those of the next ones.
        draws = None if work.draws is None else work.draws.part(positions)
        images = order.finish(images, draws, self.normalization)
        labels, index = (without_waiting(rows[positions], order.device) for rows in (work.labels, work.index))
        return Batch(images, labels, index)
