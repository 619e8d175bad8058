"""Splits that do not fit in memory, or whose augmentation crops whole pictures: decoded batch by batch, ahead of the
model."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from attnrx.data.augmentation import Augmentation, Draws
from attnrx.data.decoding import CorruptImages, threads
from attnrx.data.geometry import ImageGeometry
from attnrx.data.images import Batch, ImageSet, balanced_prefix, digest, evenly_spaced, finish, rows_of_part
from attnrx.data.normalization import Normalization
from attnrx.data.passes import Pass
from attnrx.data.stored import StoredImages
from attnrx.errors import DataError
from attnrx.shapes import Int, Tensor, UInt8

AHEAD = 2  # batches that are being decoded while the model works on another

Picture = Callable[[], UInt8[Tensor, "channels height width"]]


@dataclass(frozen=True)
class Work:
    """One batch before decoding."""

    pictures: list[Picture]
    labels: Int[Tensor, "batch"]
    index: Int[Tensor, "batch"]
    draws: Draws | None


@dataclass(frozen=True)
class Stream:
    """How encoded images become batches; shared by every kind of split that streams."""

    geometry: ImageGeometry
    normalization: Normalization
    corrupt: CorruptImages = field(default_factory=CorruptImages)

    def batches(self, works: Iterable[Work], order: Pass) -> Iterator[Batch]:
        """Decodes with a pool of threads, keeping the order; images that cannot be decoded are skipped or raised."""
        waiting: deque[tuple[Work, list[Future]]] = deque()
        pool = ThreadPoolExecutor(threads())
        try:
            for work in works:
                waiting.append((work, self._submit(pool, work, order.augmentation)))
                if len(waiting) > AHEAD:
                    yield self._collect(*waiting.popleft(), order)
            while waiting:
                yield self._collect(*waiting.popleft(), order)
        finally:  # also when the consumer stops early: pending decodes are cancelled
            for _, tasks in waiting:
                for task in tasks:
                    task.cancel()
            pool.shutdown(wait=False)

    def _submit(self, pool: ThreadPoolExecutor, work: Work, augmentation: Augmentation | None) -> list[Future]:
        if work.draws is None or augmentation is None or augmentation.area is None:
            return [pool.submit(self._still, picture) for picture in work.pictures]
        windows = work.draws.window
        return [pool.submit(self._window, picture, augmentation, windows[i]) for i, picture in enumerate(work.pictures)]

    def _still(self, picture: Picture) -> Tensor:
        return self.geometry.still(picture())

    def _window(self, picture: Picture, augmentation: Augmentation, window: Tensor) -> Tensor:
        pixels = picture()
        return self.geometry.window(pixels, augmentation.box(pixels.shape[1], pixels.shape[2], window))

    def _collect(self, work: Work, tasks: list[Future], order: Pass) -> Batch:
        pixels, kept = [], []
        for position, task in enumerate(tasks):
            try:
                pixels.append(task.result())
                kept.append(position)
            except DataError as error:
                self.corrupt.report(error)
        if not pixels:
            raise DataError(
                f"none of the {len(tasks)} images of a batch can be decoded; the first: "
                f"{self.corrupt.found[-len(tasks)]}"
            )
        images = torch.stack(pixels)
        if order.device.type == "cuda":
            images = images.pin_memory()
        images = images.to(order.device, non_blocking=True)
        draws = None if work.draws is None else work.draws.part(kept)
        images = finish(images, draws, order, self.normalization)
        return Batch(images, work.labels[kept].to(order.device), work.index[kept].to(order.device))


@dataclass(frozen=True, eq=False)
class StreamedImages(ImageSet):
    """Some rows of encoded records, in any order."""

    name: str
    records: StoredImages
    rows: Int[Tensor, "images"]
    stream: Stream

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Messages of the images that could not be decoded so far."""
        return tuple(self.stream.corrupt.found)

    @property
    def fingerprint(self) -> str:
        """Hashes every label and the encoded bytes of up to 64 images."""
        return digest(
            self.name,
            self.records.labels[self.rows],
            (self.records.content(int(self.rows[position])) for position in evenly_spaced(len(self))),
        )

    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images going round the classes."""
        return replace(self, rows=self.rows[balanced_prefix(self.records.labels[self.rows], count)])

    def part(self, process: int, processes: int, batch_size: int) -> "ImageSet":
        """Returns whole batches of an ordered pass."""
        return replace(self, rows=self.rows[rows_of_part(len(self), process, processes, batch_size)])

    def renormalized(self, normalization: Normalization) -> "ImageSet":
        """Returns the same images on another scale."""
        return replace(self, stream=replace(self.stream, normalization=normalization))

    def _pass(self, order: Pass) -> Iterator[Batch]:
        return self.stream.batches(self._works(order), order)

    def _works(self, order: Pass) -> Iterator[Work]:
        for step in order.steps(len(self)):
            rows = self.rows[step.positions]
            yield Work(
                pictures=[partial(self.records.picture, row, self.stream.geometry.channels) for row in rows.tolist()],
                labels=self.records.labels[rows],
                index=self.records.sources[rows],
                draws=order.draws(step.number, step.size, step.share),
            )
