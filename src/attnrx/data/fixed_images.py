"""Images that were read once from their source and are the same in every pass.

A user's data may return different images each time you read them, because of random crops, sampling with replacement,
or shuffling. To compare two models, or to plan on one part of the images and verify on another, you need the same
images each time. So every source is read in one pass into an `ImageStore`, and all later code reads the store.
"""

import hashlib
import io
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnrx.data.images import Batch, Pass, RowImages, digest, require_labelled
from attnrx.support.atomic_writes import scratch_file
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.hardware import cache_folder, restored_random_states
from attnrx.support.preprocessing import Normalization
from attnrx.support.progress import track
from attnrx.support.shapes import Float, ImageBatch, Int, Tensor, UInt8

MEMORY = 2 * 2**30  # the most bytes of images in memory, more are stored in a file
MAX_IMAGES = 50_000  # the most images that a call reads by default, which is the size of ImageNet's validation set
MAX_UNCOUNTED = 10_000  # the most images from an iterable without a length, which may be endless
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LEVELS = 256
ONE_DRAW = "one fixed draw"  # in the notes on images that would differ if they were read again


@contextmanager
def seeded_draws(seed: int, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Seeds the global random generators of Python, NumPy and torch inside the context, and restores them afterwards.

    Random transforms in a user's dataset draw from these global generators. With a fixed seed, the same images are
    therefore read every time, and your own random state does not change. The state of other `generators`, e.g. a
    sampler's, is restored but not seeded.
    """
    own = [(generator, generator.get_state()) for generator in generators]
    with restored_random_states():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed other devices, too
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            for generator, state in own:
                generator.set_state(state)


def content_hashes(images: ImageBatch) -> Int[Tensor, "batch"]:
    """Returns one hash per image. Images that are equal bit by bit have equal hashes."""
    # 8 bytes suffice: any two of 50,000 different images share a hash with a probability of about 1e-10.
    rows = images.contiguous().view(torch.uint8).flatten(1).numpy()
    digests = [hashlib.blake2b(row, digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], dtype=torch.int64)


@dataclass(frozen=True, eq=False, repr=False)
class ImageStore(Displayed):
    """Images as they were read. Each image has a label (-1 if unknown), its row in the source, and a hash.

    `values` holds the images in the dtype of the source, or as 8-bit codes. A code is an index into `levels`: for each
    channel, `levels` holds the values that the 256 pixel levels have in the source.
    """

    values: Float[Tensor, "stored channels height width"] | UInt8[Tensor, "stored channels height width"]
    levels: Float[Tensor, "channels 256"] | None
    numbers: Int[Tensor, "stored *labels"]
    sources: Int[Tensor, "stored"]
    hashes: Int[Tensor, "stored"]

    @property
    def labels(self) -> Int[Tensor, "stored"] | None:
        """The labels, which `take` uses to balance the classes. None if an image has no label or more than one."""
        return self.numbers if self.numbers.ndim == 1 and bool((self.numbers >= 0).all()) else None

    def images(self, rows: Int[Tensor, "batch"]) -> ImageBatch:
        """Returns the images of these rows, in the dtype of the source."""
        values = self.values[rows]
        return values if self.levels is None else _decoded(values, self.levels)


@dataclass(frozen=True, eq=False, repr=False)
class FixedImages(Displayed, RowImages):
    """Some rows of an image store.

    `notes` says how the images were read. `problem` says why the labels cannot be compared with a model's predictions.
    `others` holds the images of other sizes from the same data, as one set per size.
    """

    store: ImageStore
    notes: tuple[str, ...] = ()
    problem: str | None = None
    others: tuple["FixedImages", ...] = ()

    @property
    def has_labels(self) -> bool:
        return bool((self.store.numbers[self.rows] >= 0).any())

    @property
    def summary(self) -> str:
        """The number, shape and dtype of the images, and their size in MiB."""
        values, codes = self.store.values[0], self.store.levels is not None
        kind = "8 bits per value" if codes else str(values.dtype).removeprefix("torch.")
        shape = " x ".join(map(str, values.shape))
        return f"{len(self):,} images of {shape}, {kind}, {len(self) * values.nbytes / 2**20:,.0f} MiB"

    @property
    def hashes(self) -> Int[Tensor, "images"]:
        return self.store.hashes[self.rows]

    @property
    def fingerprint(self) -> str:
        """The name, the number of images, and a hash of all labels and contents. The name does not affect the hash."""
        return self.name + digest("", self.store.numbers[self.rows], [self.hashes.numpy().tobytes()])

    def limited_to(self, num_classes: int) -> "FixedImages":
        """Returns the set itself. Raises DataError unless every image has a label below `num_classes`."""
        require_labelled(self.store.numbers[self.rows], num_classes, self.name)
        return self

    def _pass(self, order: Pass) -> Iterator[Batch]:
        for positions, _ in order.steps(len(self)):
            rows, store = self.rows[positions], self.store
            yield Batch(store.images(rows), store.numbers[rows], store.sources[rows]).to(order.device)


def read_once(
    batches: Iterable[Batch],
    name: str,
    *,
    normalization: Normalization | None = None,
    total: int | None = None,
    limit: int = MAX_IMAGES,
    distinct: bool = False,
) -> FixedImages:
    """Reads batches once into a store. A store of more than MEMORY bytes uses a file, which is deleted with it.

    If images have several sizes, the returned set contains the images of the most frequent size, and its `others`
    contains the rest.

    Args:
        batches: The images to read.
        name: The name of the set in messages and notes.
        normalization: The model's normalization. With it, images from 8-bit pixels are stored in one byte per value.
        total: The number of batches for the progress bar, if it is known.
        limit: The maximum number of images to read.
        distinct: Whether repeated images are left out.

    Raises:
        DataError: The batches contain no image, or the file cannot be written.
        InvalidInput: The images differ in their dtype or their number of channels.
    """
    writers: dict[tuple[int, ...], _Writer] = {}  # by the shape of the images
    kinds, known = set[tuple[int, torch.dtype]](), set[int]()
    count, is_cut = 0, False
    for batch in track(batches, f"reading the images of {name}", total):
        rows = torch.arange(min(len(batch), limit - count))
        is_cut = len(rows) < len(batch)
        hashes = content_hashes(batch.images[rows])
        count += len(rows)
        if distinct:
            new = [row for row, each in enumerate(hashes.tolist()) if not (each in known or known.add(each))]
            rows = torch.tensor(new, dtype=torch.long)
        kinds.add((batch.images.shape[1], batch.images.dtype))
        if len(kinds) > 1:
            found = " and ".join(f"{channels} channels of {dtype}" for channels, dtype in kinds)
            raise InvalidInput(f"the data have images of {found}; give one kind.")
        if len(rows):
            shape = tuple(batch.images.shape[1:])
            if shape not in writers:
                writers[shape] = _Writer(batch.images, normalization)
            writers[shape].add(Batch(batch.images[rows], batch.labels[rows], batch.index[rows]), hashes[rows])
        if is_cut:
            break
    if not writers:
        raise DataError(f"{name} yielded no image; give at least one.")
    first, *others = sorted(writers.values(), key=lambda writer: -writer.count)
    used, notes = sum(writer.count for writer in writers.values()), []
    if is_cut:
        notes.append(f"{name}: only the first {count:,} images are used: the limit is {limit:,}")
    if used < count:
        notes.append(f"{name}: {count - used:,} of {count:,} images were yielded more than once and are used once")
    if any(writer.is_on_disk for writer in writers.values()):
        size = f"{sum(writer.file.tell() for writer in writers.values()) / 2**30:.1f} GiB"
        notes.append(f"{name}: the images take {size} and are in a temporary file in {cache_folder()}")
    if others:
        notes.append(
            f"{name}: images of {len(writers)} sizes: the {first.count:,} of {first.shape[1]} x {first.shape[2]} are "
            f"used to plan and to compare, the other {used - first.count:,} to compare the outputs at their sizes"
        )
    sets = [FixedImages(name, each.store(), torch.arange(each.count), tuple(notes)) for each in (first, *others)]
    return replace(sets[0], others=tuple(sets[1:]))


def _decoded(
    codes: UInt8[Tensor, "batch channels height width"], levels: Float[Tensor, "channels 256"]
) -> Float[Tensor, "batch channels height width"]:
    return levels.flatten()[_flat(codes)]


def _flat(codes: Tensor) -> Tensor:
    """Returns for every code its index in the flattened table of levels."""
    return codes.long() + (LEVELS * torch.arange(codes.shape[1]))[:, None, None]


class _Writer:
    """Collects images of one shape in memory. If they need more than MEMORY bytes, uses a temporary file instead.

    Images made from 8-bit pixels have at most 256 different values per channel, even after resizing, cropping and
    normalization. They are stored without loss as 8-bit codes, and the values of all codes are stored once per channel.
    The model's normalization is used to find the code of a value. The values themselves are copied from the images,
    because the user's preprocessing may round differently.
    """

    def __init__(self, first: ImageBatch, normalization: Normalization | None):
        self.shape, self.dtype, self.normalization = tuple(first.shape[1:]), first.dtype, normalization
        self.levels: Float[Tensor, "channels 256"] | None = None
        if normalization is not None and len(normalization.mean) == first.shape[1]:
            self.levels = torch.full((first.shape[1], LEVELS), torch.nan, dtype=first.dtype)
        self.file: Any = io.BytesIO()
        self.count = 0
        self.parts: list[tuple[Tensor, Tensor, Tensor]] = []  # labels, rows in the source, hashes

    @property
    def is_on_disk(self) -> bool:
        return not isinstance(self.file, io.BytesIO)

    def add(self, batch: Batch, hashes: Int[Tensor, "batch"]) -> None:
        codes = self._codes(batch.images)
        if self.levels is not None and codes is None:  # the first images that are not made from 8-bit pixels
            earlier, levels = self._values().split(64) if self.count else (), self.levels
            self.levels, self.file = None, io.BytesIO()
            for part in earlier:
                self._append(_decoded(part, levels))
        self._append(batch.images if codes is None else codes)
        self.parts.append((batch.labels, batch.index, hashes))
        self.count += len(batch)

    def _codes(self, images: ImageBatch) -> UInt8[Tensor, "batch channels height width"] | None:
        """Returns the images as codes, or None if they have values that are not normalized 8-bit pixels."""
        if self.levels is None or self.normalization is None:
            return None
        pixels = 255 * self.normalization.invert(images.to(torch.promote_types(images.dtype, torch.float32)))
        if not bool(((pixels > -0.5) & (pixels < LEVELS - 0.5)).all()):  # also false for NaN
            return None
        codes = pixels.round().to(torch.uint8)
        flat, values = _flat(codes), self.levels.clone()
        values.flatten()[flat] = images
        values = torch.where(self.levels.isnan(), values, self.levels)
        if not torch.equal(values.flatten()[flat], images):
            return None
        self.levels = values
        return codes

    def _append(self, block: Tensor) -> None:
        content = block.contiguous().view(torch.uint8).numpy().data
        try:
            if not self.is_on_disk and self.file.tell() + content.nbytes > MEMORY:
                cache_folder().mkdir(parents=True, exist_ok=True)
                held, self.file = self.file, scratch_file(cache_folder() / "images")
                self.file.write(held.getbuffer())
            self.file.write(content)
        except OSError as error:
            raise DataError(
                f"cannot write the images to a file in {cache_folder()}: {error.strerror or error}. Give fewer images, "
                "or name a folder with more space in ATTNRX_CACHE."
            ) from error

    def _values(self) -> Tensor:
        """Returns the stored images, or their codes if images are stored as codes."""
        if self.is_on_disk:
            self.file.flush()
            stored = torch.from_file(self.file.name, shared=False, size=self.file.tell(), dtype=torch.uint8)
            self.file.close()  # this deletes the file, but its content lives as long as it is mapped
        else:
            stored = torch.frombuffer(self.file.getbuffer(), dtype=torch.uint8)
        return stored.view(self.dtype if self.levels is None else torch.uint8).view(self.count, *self.shape)

    def store(self) -> ImageStore:
        """Returns the collected images as a store. If the images are stored as codes, the store also has the levels."""
        return ImageStore(self._values(), self.levels, *map(torch.cat, zip(*self.parts, strict=True)))
