"""Image sets, which yield batches in a repeatable order. One of the classes is for images that attnrx itself decodes.

The trainer relies on two guarantees. A pass that starts at step s equals a full pass without its first s steps, so
training can resume exactly. N parallel processes together read the same images as a single process, in the same order
and with the same random numbers.
"""

import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from attnrx.support.arguments import checked, require_fields, whole
from attnrx.support.display import Displayed
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.optional import required_module
from attnrx.support.pictures import open_picture, pixels_of
from attnrx.support.preprocessing import ImageGeometry, Normalization, without_waiting
from attnrx.support.shapes import Bool, Float, Int, Tensor, UInt8

# For methods that return an object of the class they are called on.
Images = TypeVar("Images", bound="ImageSet")
Rows = TypeVar("Rows", bound="RowImages")
UNLABELLED = -1  # not a class number, so it never equals an answer
Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 10  # tries to find a crop inside the picture, as in torchvision's RandomResizedCrop
RATIO = (3 / 4, 4 / 3)  # the allowed ratios of width to height for such a crop
ORDER, AUGMENTATION = 0, 1  # the purpose of a generator, so that the two never share random numbers
CHUNK = 256  # images per step when a whole set is decoded
AHEAD = 2  # batches that are decoded while the model works on another one
IN_MEMORY = 2 * 2**30  # the most bytes of decoded pixels in memory, larger stores are decoded in every pass
# Keys of items and columns of tables that may hold images and labels. If several are present, the first one in the list
# is used. transformers' processors and collators return "pixel_values" and "labels". "img" and "fine_label" are CIFAR's
# columns on the hub.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "inputs", "x")
LABEL_KEYS = ("labels", "label", "targets", "target", "fine_label", "y")
LABEL_WORDS = frozenset({"label", "labels", "class", "classes", "category", "categories", "target", "targets", "y"})
NO_LABELS = (
    "the data has no labels, and this needs them: give pairs (images, labels), or mappings with a key such as 'label'."
)


def likely_labels(names: Iterable[Any]) -> tuple[str, ...]:
    """Returns the keys or columns that may contain a label, by the words in their names, e.g. gt_label or classId."""
    return tuple(name for name in names if isinstance(name, str) and LABEL_WORDS & {*_words(name)})


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


@dataclass(frozen=True)
class Batch:
    """Normalized images, their labels, and `index`: each image's row in its source, for paired comparisons.

    A label is a class number. For a multi-label model, the label of an image is a vector with a 0 or 1 per class. For a
    user's metric, a label may be any tensor.
    """

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch *labels"]
    index: Int[Tensor, "batch"]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> "Batch":
        """Returns the batch on a device."""
        return Batch(self.images.to(device), self.labels.to(device), self.index.to(device))


def generator(*parts: int) -> torch.Generator:
    """Returns a CPU generator seeded by all `parts`. Neighbouring seeds or steps get unrelated random numbers."""
    # The seed is a hash of all parts. With a sum, step 1 of seed 0 would get the numbers of step 0 of seed 1. The
    # generator is on the CPU, because other devices generate different numbers.
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


class Draws(NamedTuple):
    """The random numbers for augmenting one batch, drawn on the CPU, so that they are the same on all devices."""

    shift: Int[Tensor, "batch 2"]
    mirror: Bool[Tensor, "batch"]
    window: Float[Tensor, "batch attempts 4"]


@dataclass(frozen=True)
class Augmentation:
    """Random crops with `padding` black pixels around the image, and mirroring of half the images.

    If `area` is (low, high), the crop is instead a random window, which is resized to the model's input size. The
    window covers a random share of the picture's area, between low and high. Such crops need whole pictures, so every
    pass decodes the split again.
    """

    example = "attnrx.data.Augmentation()"

    padding: int = 4
    flip: bool = True
    area: tuple[float, float] | None = None

    def __post_init__(self):
        require_fields(self, padding=whole(0, 65_536))
        if self.area is not None and (len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1):
            raise InvalidInput(f"Augmentation(area={self.area}): area is a range of shares, 0 < low <= high <= 1.")

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draws random numbers for `count` images. Disabling an option does not change the numbers for the others."""
        return Draws(
            shift=torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator),
            mirror=(torch.rand(count, generator=generator, dtype=torch.float32) < 0.5) & self.flip,
            window=torch.rand(count, ATTEMPTS if self.area else 0, 4, generator=generator, dtype=torch.float32),
        )

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Draws
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Crops and mirrors a batch on its own device, with one gather operation."""
        batch, channels, height, width = images.shape
        device = images.device
        shift, mirror = without_waiting(draws.shift, device), without_waiting(draws.mirror, device)
        # Crop and mirroring select rows [batch, height] and columns [batch, width] of the padded images. One gather
        # with both costs one pass over the pixels.
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        down = shift[:, :1] + torch.arange(height, device=device)
        across = torch.arange(width, device=device).expand(batch, width)
        across = shift[:, 1:] + torch.where(mirror[:, None], across.flip(1), across)
        image = torch.arange(batch, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        return padded[image, channel, down[:, None, :, None], across[:, None, None, :]]

    def box(self, height: int, width: int, window: Float[Tensor, "attempts 4"]) -> Box:
        """Returns the crop window of a picture: the first random window that fits, else the largest central one."""
        low, high = self.area or (1.0, 1.0)
        # Every attempt has four numbers in [0, 1). They are drawn for all attempts, even if the first one succeeds.
        for share, ratio, down, across in window.tolist():
            area = height * width * (low + share * (high - low))
            # The logarithm of the ratio is uniform, so 3/4 and 4/3 are equally likely.
            shape = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
            rows, columns = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < rows <= height and 0 < columns <= width:
                return int(down * (height - rows + 1)), int(across * (width - columns + 1)), rows, columns
        rows = min(height, round(width / RATIO[0]))
        columns = min(width, round(height * RATIO[1]))
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class Pass:
    """The arguments of `ImageSet.batches`, which determine the images that each process reads in each step."""

    batch_size: int
    seed: int | None
    augmentation: Augmentation | None
    device: torch.device
    shard: tuple[int, int]
    start: int

    def __post_init__(self):
        process, processes = self.shard
        is_whole = 0 <= process < processes and self.batch_size >= 1 and self.batch_size % processes == 0
        least = min(self.start, 0 if self.seed is None else self.seed)
        if not is_whole or least < 0 or (self.augmentation is not None and self.seed is None):
            raise InvalidInput(
                f"batches(batch_size={self.batch_size}, seed={self.seed}, augmentation={self.augmentation}, "
                f"shard={self.shard}, start={self.start}): give a batch size for all processes together, a positive "
                "multiple of their number; a shard (process, processes) with 0 <= process < processes; no negative "
                "seed or start; and no augmentation without a seed."
            )

    def steps(self, count: int) -> Iterator[tuple[Int[Tensor, "local"], Draws | None]]:
        """Yields, for every step, the positions (among `count` images) that this process reads, and its random numbers.

        A shuffled pass drops the last incomplete batch. Each process gets a contiguous share of every batch, in the
        order of the processes. The shares have equal sizes, except in the last batch of an ordered pass. If this
        process gets no images of the last batch, it skips the step.

        Raises:
            DataError: There are too few images for one batch of a shuffled pass, or the pass starts after its end.
        """
        steps = count // self.batch_size if self.seed is not None else -(-count // self.batch_size)
        if steps == 0 and self.seed is not None:
            raise DataError(
                f"a shuffled pass takes whole batches of {self.batch_size}, but the split holds {count} images; "
                "use a smaller batch size."
            )
        if self.start > steps:
            raise DataError(
                f"a pass cannot start at step {self.start}: it has {steps} steps of {self.batch_size} images."
            )
        # The whole order is drawn, whatever `start` is, so a resumed pass continues in the same order.
        order = torch.arange(count)
        if self.seed is not None:
            order = torch.randperm(count, generator=generator(self.seed, ORDER))
        process, processes = self.shard
        for number in range(self.start, steps):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            share = slice(len(batch) * process // processes, len(batch) * (process + 1) // processes)
            if share.start == share.stop:
                continue
            draws = None
            if self.augmentation is not None and self.seed is not None:
                # Every process draws the numbers of the whole batch, so they do not depend on the number of processes.
                drawn = self.augmentation.draw(len(batch), generator(self.seed, AUGMENTATION, number))
                draws = Draws(*(numbers[share] for numbers in drawn))
            yield batch[share], draws


class ImageSet(ABC):
    """The images of one split. Every call of `batches` begins a new pass, so an image set is never used up.

    `notes` says how the images were read, and is copied into the evidence. `problem` says why the labels, if there are
    any, cannot be compared with a model's predictions. `can_augment` is True if the images have no transforms of their
    own, so that attnrx may crop and mirror them.
    """

    notes: tuple[str, ...] = ()
    problem: str | None = None
    can_augment = False

    @property
    def has_labels(self) -> bool:
        """Whether every image has a label. If not, `Batch.labels` are -1."""
        return True

    @property
    def label_problem(self) -> str | None:
        """The reason why the labels cannot be compared with a model's predictions, or None if they can."""
        return self.problem if self.problem is not None or self.has_labels else NO_LABELS

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short text with the name, the number of images, and a hash of their labels and contents."""

    @abstractmethod
    def at(self: Images, positions: Int[Tensor, "chosen"]) -> Images:
        """Returns the images at these positions."""

    @abstractmethod
    def _labels(self) -> Int[Tensor, "images"] | None:
        """Returns the labels if they are known before the images are read, else None."""

    def take(self: Images, count: int) -> Images:
        """Returns `count` images: balanced over the classes if labels are known in advance, else evenly spaced.

        Raises:
            DataError: The set has fewer than `count` images, or `count` is below 1.
        """
        if not 1 <= count <= len(self):
            raise DataError(
                f"{count} images were requested of a split that holds {len(self)}; ask for 1 to {len(self)}."
            )
        return self.at(self._spread(count))

    def _spread(self, count: int) -> Int[Tensor, "chosen"]:
        """Returns positions of `count` images, balanced or evenly spaced, because a dataset may be sorted by class."""
        # Balanced and evenly spread positions are deterministic, so a run can be repeated. Spread rows stay in order.
        labels = self._labels()
        return torch.arange(count) * len(self) // count if labels is None else round_robin(labels)[:count]

    def limited_to(self, num_classes: int) -> "ImageSet":
        """Returns the images. If they are a user's own, checks that their labels are below `num_classes`.

        Datasets that attnrx loads are not checked here, because their labels are checked on loading. The check runs on
        the CPU, because on a GPU an invalid label would abort the process.
        """
        return self

    @abstractmethod
    def _pass(self, order: Pass) -> Iterator[Batch]:
        """Yields the batches of one pass. The settings in `order` are already checked."""

    def batches(
        self,
        batch_size: int,
        *,
        seed: int | None = None,
        augmentation: Augmentation | None = None,
        device: torch.device | str = "cpu",
        shard: tuple[int, int] = (0, 1),
        start: int = 0,
    ) -> Iterator[Batch]:
        """Returns one pass over the images in normalized batches on a device.

        Without a seed, the pass is ordered and contains every image once. With a seed, it is shuffled and drops the
        last incomplete batch.

        Args:
            batch_size: The images per batch, for all processes together.
            seed: The seed for order and augmentation. Use a different one for every epoch.
            augmentation: Random crops and mirroring, for training.
            device: The device of the batches.
            shard: A pair (p, N): this process is number p (from 0) of N processes, and receives its part of each batch.
            start: The number of steps to skip. The pass then continues as if the earlier steps had run.

        Raises:
            InvalidInput: The arguments do not fit together, or this set cannot be augmented.
            DataError: The pass has no step, or an image cannot be read.
        """
        if augmentation is not None and not self.can_augment:
            raise InvalidInput(
                "the images are augmented by their own transforms; attnrx augments only the datasets that it loads "
                "itself."
            )
        return self._pass(Pass(batch_size, seed, augmentation, torch.device(device), shard, start))


@dataclass(frozen=True, eq=False)
class RowImages(ImageSet):
    """Some rows of a store that can be read in any order. `store.labels` holds the labels of all its rows, or None."""

    name: str
    store: Any
    rows: Int[Tensor, "images"]

    def __len__(self) -> int:
        return len(self.rows)

    def at(self: Rows, positions: Int[Tensor, "chosen"]) -> Rows:
        return replace(self, rows=self.rows[positions])

    def _labels(self) -> Int[Tensor, "images"] | None:
        return None if self.store.labels is None else self.store.labels[self.rows]


def digest(name: str, labels: Int[Tensor, "images *labels"], samples: Iterable[bytes]) -> str:
    """Returns a fingerprint: the name, the number of images, and a hash of all labels and of the given `samples`."""
    hashed = hashlib.sha256(f"{name}:{len(labels)}".encode())
    hashed.update(labels.cpu().numpy().tobytes())
    for sample in samples:
        hashed.update(sample)
    return f"{name}:{len(labels)}:{hashed.hexdigest()[:16]}"


def evenly_spaced(count: int, maximum: int = 64) -> list[int]:
    """Returns at most `maximum` positions out of `count`, evenly spaced from the first to the last."""
    # Positions are computed in float64, because float32 cannot represent all whole numbers above 2**24.
    return torch.linspace(0, count - 1, min(count, maximum), dtype=torch.float64).round().long().tolist()


def require_labelled(labels: Int[Tensor, "images *labels"], num_classes: int | None = None, name: str = "data") -> None:
    """Raises DataError for an image without a label, or with a label that is not below `num_classes`."""
    # Negative numbers are UNLABELLED, or what other libraries use for it, such as -100.
    wrong = labels < 0 if num_classes is None else (labels < 0) | (labels >= num_classes)
    missing = int(wrong[..., None].flatten(1).any(1).sum())
    if missing:
        label = int(labels[wrong][0])
        found = "an image without a label" if label == UNLABELLED else f"an image with the label {label}"
        known = "" if num_classes is None else f", and the model has the classes 0 to {num_classes - 1}"
        raise DataError(
            f"{name} has {found}{known} ({missing} of {len(labels)} images are like that): give every image one, or "
            "all without labels where none are needed."
        )


def require_labels(images: ImageSet) -> None:
    """Raises DataError with the `label_problem` if images have no labels, or labels that do not fit the model."""
    if images.label_problem is not None:
        raise DataError(images.label_problem)


def rank_within_class(labels: Int[Tensor, "images"], order: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
    """Returns how many images of the same class precede each image in this order."""
    # Sorting groups the images by class. An image's rank is its position minus the position where its class begins.
    by_class = order[labels[order].argsort(stable=True)]  # grouped by class, each class in the given order
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    turn = torch.empty_like(labels)
    turn[by_class] = torch.arange(len(labels)) - first[labels[by_class]]
    return turn


def round_robin(labels: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
    """Returns all positions in rounds over the classes: the first image of each class, then the second, and so on."""
    # Classes are renumbered by rank, because a class number can be of any size.
    labels = labels.unique(return_inverse=True)[1]
    # Images are sorted by round, and within a round by class.
    turn = rank_within_class(labels, torch.arange(len(labels)))
    return (turn * len(labels.bincount()) + labels).argsort(stable=True)


def hold_out(
    labels: Int[Tensor, "images"], keys: Iterable[str | int], share: float, seed: int
) -> Bool[Tensor, "images"]:
    """Returns a mask that selects this share of every class. It selects the same images on every machine.

    Seed and key of each image are hashed, and the images with the lowest hashes are selected. If a class has two or
    more images, at least one of them is selected, and at least one is not.
    """
    # With a hash, unlike a random permutation, most images keep their side when others are added or removed. 7 bytes
    # fit into a signed int64.
    hashes = [hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=7).digest() for key in keys]
    order = torch.tensor([int.from_bytes(raw) for raw in hashes], dtype=torch.int64).argsort(stable=True)
    sizes = labels.bincount()
    wanted = (sizes * share).round().long().clamp(min=1)
    wanted = torch.where(sizes > 1, torch.minimum(wanted, sizes - 1), 0)
    return rank_within_class(labels, order) < wanted[labels]


@dataclass(frozen=True, eq=False, repr=False)
class StoredImages(Displayed):
    """The encoded images of one split in storage order. Every storage format is converted to this class.

    `sources` holds the row of each image in the source. `content` reads the bytes of the image at a position. `where`
    returns the image's file or row, for messages. `pixels` holds the images if they are already decoded.
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
        """Decodes one image to grey (1 channel) or RGB (3). With `channels=None`, grey images stay grey.

        Raises:
            DataError: The image cannot be decoded. The message contains `where(position)`.
        """
        if self.pixels is not None:
            return self.pixels[position]
        try:
            with open_picture(self.content(position)) as picture:
                return torch.from_numpy(pixels_of(picture, channels, alpha)).permute(2, 0, 1)
        except DataError:  # the file was deleted
            raise
        except Exception as error:  # Pillow's readers raise many types: SyntaxError, struct.error, EOFError
            where, reason = self.where(position), str(error) or type(error).__name__
            raise DataError(f"cannot decode the image {where}: {reason}. Repair or remove it.") from error


@dataclass(frozen=True, eq=False, repr=False)
class LoadedImages(Displayed, RowImages):
    """Some rows of stored images, resized and cropped as `geometry` says, and augmented in batches on the device.

    `photos` says whether training crops parts of the pictures. If so, decoded pictures are not kept in memory.
    `numbers` maps every class of the dataset to a class number of the model's head, or to -1 (no label). Without
    `numbers`, the dataset's labels are used. If the labels do not fit the head, `problem` says why.
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
        """The name, the number of images, and a hash of every label and of the bytes of up to 64 images."""
        sampled = self.rows[evenly_spaced(len(self))].tolist()
        return digest(self.name, self.store.labels[self.rows], map(self.store.content, sampled))

    def relabelled(self, numbers: Int[Tensor, "classes"]) -> "LoadedImages":
        """Returns the same images with new labels. `numbers` maps each current class to a new class, or to -1."""
        return replace(self, numbers=numbers if self.numbers is None else numbers[self.numbers], problem=None)

    def renormalized(self, normalization: Normalization) -> "LoadedImages":
        """Returns the same images, normalized by the mean and standard deviation that another model needs."""
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
        """The decoded pixels of all images in this set."""
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
        """Yields every step's rows, random numbers and pixels. Threads decode the images of later steps in advance.

        Images are yielded in order, so every run reports the same corrupt image first.
        """
        waiting: deque[tuple[Tensor, Draws | None, Iterator[Tensor]]] = deque()
        # Decoding releases the GIL, so there is one thread per usable core. Above 16, memory bandwidth is the limit.
        # macOS and Windows have no sched_getaffinity.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        pool = ThreadPoolExecutor(max(1, min(16, cores)))

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
            # `shutdown` does not wait, because batches that nobody consumes may still be decoding.
            pool.shutdown(wait=False, cancel_futures=True)

    def _picture(
        self, windows: Augmentation | None, row: int, window: Tensor | None
    ) -> UInt8[Tensor, "channels height width"]:
        """Returns a picture's pixels, cropped to `window`. If it is None, resizes and crops as in evaluation."""
        pixels = self.store.picture(row, self.geometry.channels, self.geometry.alpha)
        if windows is None or window is None:
            try:
                return self.geometry.fit(pixels)
            except ValueError as error:  # the result would have too many pixels
                raise DataError(f"cannot resize the image {self.store.where(row)}: {error}.") from error
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
        # Images are augmented as bytes, which need a quarter of float32's memory. They are normalized afterwards, so
        # the borders are black.
        if draws is not None and order.augmentation is not None:
            images = order.augmentation.apply(images, draws)
        labels = self.store.labels[rows] if self.numbers is None else self.numbers[self.store.labels[rows]]
        labels, sources = (without_waiting(each, order.device) for each in (labels, self.store.sources[rows]))
        return Batch(self.normalization.apply(images.float() / 255), labels, sources)


@checked()
def from_tensors(
    name: str,
    pixels: UInt8[Tensor, "images channels height width"],
    labels: Int[Tensor, "images"],
    normalization: Normalization,
) -> LoadedImages:
    """Makes an image set from pixels that are already in memory.

    Args:
        name: The name of the set in messages and fingerprints.
        pixels: 8-bit pixels [images, channels, height, width].
        labels: The class number of every image.
        normalization: The mean and standard deviation by which batches are normalized.

    Raises:
        InvalidInput: There are no images, or the number of labels is not the number of images.
    """
    if len(pixels) != len(labels) or not len(pixels):
        raise InvalidInput(
            f"{name}: {len(pixels)} images and {len(labels)} labels; give one label for each, at least one."
        )
    rows = torch.arange(len(labels))
    store = StoredImages(labels, rows, lambda row: pixels[row].numpy().tobytes(), lambda row: f"{name}, {row}", pixels)
    geometry = ImageGeometry.of_size((pixels.shape[2], pixels.shape[3]), pixels.shape[1], "fill")  # as they are
    return LoadedImages(name, store, rows, geometry, normalization)
