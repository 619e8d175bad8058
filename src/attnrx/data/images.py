"""One split of a dataset as everything above sees it: batches, in an order that can be repeated exactly.

Two laws, which the trainer's exact resume and its several processes stand on:

    a pass that starts at step s  ==  the same pass from the beginning, without its first s steps
    N processes, side by side     ==  one process: same images, same order, same random numbers
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from attnrx.support.arguments import require_fields, whole
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.preprocessing import without_waiting
from attnrx.support.shapes import Bool, Float, Int, Tensor, UInt8

UNLABELLED = -1  # no class number, so it cannot equal an answer
Box = tuple[int, int, int, int]  # top, left, height, width
ATTEMPTS = 10  # tries at a crop that fits inside the picture, as torchvision's RandomResizedCrop makes
RATIO = (3 / 4, 4 / 3)  # widths over heights that such a crop may have
ORDER, AUGMENTATION = 0, 1  # what a generator is for, so that the two never share random numbers
# Of several keys that an item or columns that a table has, the first in these lists is used. transformers' processors
# and collators return "pixel_values" and "labels"; "img" and "fine_label" are the columns of CIFAR on the hub.
IMAGE_KEYS = ("pixel_values", "image", "images", "img", "inputs", "x")
LABEL_KEYS = ("labels", "label", "targets", "target", "fine_label", "y")
NO_LABELS = (
    "the data has no labels, and this needs them: give pairs (images, labels), or mappings with a key such as 'label'."
)


@dataclass(frozen=True)
class Batch:
    """Images on the model's scale, their labels, and `index`: the row of each in its source, for paired comparisons.

    A label is a class number, one 0 or 1 per label of a model of several labels, or for a user's metric any tensor.
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
    """Returns a CPU generator that depends on every part; neighbouring seeds or steps have unrelated numbers."""
    # Hashed, because with a sum step 1 of seed 0 would have the numbers of step 0 of seed 1. On the CPU, because the
    # generators of other devices give other numbers.
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


class Draws(NamedTuple):
    """The random numbers of one batch: drawn on the CPU, so that every device and every process sees the same."""

    shift: Int[Tensor, "batch 2"]
    mirror: Bool[Tensor, "batch"]
    window: Float[Tensor, "batch attempts 4"]


@dataclass(frozen=True)
class Augmentation:
    """Random crop from `padding` black pixels around the image, and mirroring of half the images.

    With `area` the crop is instead a random window holding that share of the picture, resized to the model's input;
    it needs the whole pictures, so only splits that stream can do it.
    """

    padding: int = 4
    flip: bool = True
    area: tuple[float, float] | None = None

    def __post_init__(self):
        require_fields(self, padding=whole(0, 65_536))
        if self.area is not None and (len(self.area) != 2 or not 0 < self.area[0] <= self.area[1] <= 1):
            raise InvalidInput(f"Augmentation(area={self.area}): area is a range of shares, 0 < low <= high <= 1.")

    def draw(self, count: int, generator: torch.Generator) -> Draws:
        """Draws the random numbers of `count` images; every knob draws, so that none changes the numbers of another."""
        return Draws(
            shift=torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator),
            mirror=(torch.rand(count, generator=generator, dtype=torch.float32) < 0.5) & self.flip,
            window=torch.rand(count, ATTEMPTS if self.area else 0, 4, generator=generator, dtype=torch.float32),
        )

    def apply(
        self, images: UInt8[Tensor, "batch channels height width"], draws: Draws
    ) -> UInt8[Tensor, "batch channels height width"]:
        """Crops and mirrors a batch on its own device by one gather."""
        batch, channels, height, width = images.shape
        device = images.device
        shift, mirror = without_waiting(draws.shift, device), without_waiting(draws.mirror, device)
        # Crop and mirroring are a choice of rows [batch, height] and of columns [batch, width] of the padded images; a
        # gather with both costs one pass over the pixels.
        padded = torch.nn.functional.pad(images, (self.padding,) * 4)
        down = shift[:, :1] + torch.arange(height, device=device)
        across = torch.arange(width, device=device).expand(batch, width)
        across = shift[:, 1:] + torch.where(mirror[:, None], across.flip(1), across)
        image = torch.arange(batch, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        return padded[image, channel, down[:, None, :, None], across[:, None, None, :]]

    def box(self, height: int, width: int, window: Float[Tensor, "attempts 4"]) -> Box:
        """Returns the window of one picture: the first attempt that fits inside, else the largest central one."""
        low, high = self.area or (1.0, 1.0)
        # Four numbers in [0, 1) for every attempt, drawn whether it is needed or not.
        for share, ratio, down, across in window.tolist():
            area = height * width * (low + share * (high - low))
            # uniform in the logarithm, so that 3/4 and 4/3 are equally likely
            shape = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
            rows, columns = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
            if 0 < rows <= height and 0 < columns <= width:
                return int(down * (height - rows + 1)), int(across * (width - columns + 1)), rows, columns
        rows = min(height, round(width / RATIO[0]))
        columns = min(width, round(height * RATIO[1]))
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class Pass:
    """The arguments of `ImageSet.batches`: which images each step takes, in which process."""

    batch_size: int
    seed: int | None
    augmentation: Augmentation | None
    device: torch.device
    shard: tuple[int, int]
    start: int

    def __post_init__(self):
        process, processes = self.shard
        if not 0 <= process < processes:
            raise InvalidInput(f"shard={self.shard}: give (process, processes) with 0 <= process < processes.")
        if self.batch_size < 1 or self.batch_size % processes:
            raise InvalidInput(
                f"batch_size={self.batch_size} is for all {processes} processes together: "
                "give a positive multiple of their number."
            )
        if self.augmentation is not None and self.seed is None:
            raise InvalidInput("augmentation was given without a seed: random crops need one to be repeatable.")
        if self.start < 0 or (self.seed is not None and self.seed < 0):
            raise InvalidInput(f"start={self.start}, seed={self.seed}: neither may be negative.")

    def steps(self, count: int) -> Iterator[tuple[Int[Tensor, "local"], Draws | None]]:
        """Yields the positions, of `count` images, that this process takes at each step, and its random numbers.

        A shuffled pass drops the last incomplete batch. A share without images (at the end of an ordered pass) is
        skipped. Shares are contiguous, in the order of the processes; only the last batch of an ordered pass has no
        equal ones.

        Raises:
            DataError: There are no whole batches to shuffle, or the pass starts after its end.
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
        # Drawn as a whole whatever `start` is, so that a resumed pass continues the same order.
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
                # Drawn for the whole batch, then cut.
                drawn = self.augmentation.draw(len(batch), generator(self.seed, AUGMENTATION, number))
                draws = Draws(*(numbers[share] for numbers in drawn))
            yield batch[share], draws


class ImageSet(ABC):
    """One split. It is never consumed: every call of `batches` begins a new pass.

    `notes` are what evidence has to state about the reading of the images, and `problem` is why their labels cannot be
    compared with a model's answers, though they have some. A set that `can_augment` has no transforms of its own.
    """

    notes: tuple[str, ...] = ()
    problem: str | None = None
    can_augment = False

    @property
    def has_labels(self) -> bool:
        """Whether every image has a label; where not, `Batch.labels` are -1."""
        return True

    @property
    def label_problem(self) -> str | None:
        """The reason why the labels cannot be compared with a model's answers; None where they can."""
        return self.problem if self.problem is not None or self.has_labels else NO_LABELS

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that two sets share only if they hold the same images: name, count and a hash."""

    @abstractmethod
    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images, balanced over the classes where the labels are known beforehand.

        Raises:
            DataError: The set holds fewer images, or `count` is below 1.
        """

    @abstractmethod
    def _pass(self, order: Pass) -> Iterator[Batch]:
        """Makes the batches of one pass, its knobs already checked."""

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
        """Returns one pass in batches, normalized, on a device.

        Without a seed the pass is ordered and contains every image once; with one it is shuffled and drops the last
        incomplete batch.

        Args:
            batch_size: The images of a batch, of all processes together.
            seed: The seed of order and augmentation, a different one for every epoch.
            augmentation: Random crops and mirroring, for training.
            device: The device of the batches.
            shard: (p, N): process p of N receives its part of each batch.
            start: The number of steps to skip, after which the pass continues as if it had begun with the first one.

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
    """Some rows of a store that can be read in any order; the store has the `labels` of all its rows, or None."""

    name: str
    store: Any
    rows: Int[Tensor, "images"]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, count: int) -> ImageSet:
        """Returns `count` rows: going round the classes where the store has labels, else evenly spread.

        Datasets are often sorted by class, so the first rows would be one class.
        """
        require_count(count, len(self))
        labels = self.store.labels
        # Both orders are fixed, so that a run can be repeated; the evenly spread rows stay in storage order.
        spread = torch.arange(count) * len(self) // count if labels is None else round_robin(labels[self.rows])[:count]
        return replace(self, rows=self.rows[spread])


def digest(name: str, labels: Int[Tensor, "images *labels"], samples: Iterable[bytes]) -> str:
    """Makes a fingerprint from the labels of all images and the content of some."""
    hashed = hashlib.sha256(f"{name}:{len(labels)}".encode())
    hashed.update(labels.cpu().numpy().tobytes())
    for sample in samples:
        hashed.update(sample)
    return f"{name}:{len(labels)}:{hashed.hexdigest()[:16]}"


def evenly_spaced(count: int, maximum: int = 64) -> list[int]:
    # float64, because float32 has no whole numbers above 2**24
    """Returns at most `maximum` positions of `count`, from the first to the last."""
    return torch.linspace(0, count - 1, min(count, maximum), dtype=torch.float64).round().long().tolist()


def require_count(count: int, held: int) -> None:
    """Raises DataError for a number of images that a split cannot give."""
    if not 1 <= count <= held:
        raise DataError(f"{count} images were requested of a split that holds {held}; ask for 1 to {held}.")


def require_labelled(labels: Int[Tensor, "images *labels"], num_classes: int | None = None, name: str = "data") -> None:
    """Raises DataError for an image without a label, or with one that is no class of a model of `num_classes`."""
    # Below zero are UNLABELLED, and the numbers that other libraries have for it, such as -100.
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
    """Raises DataError for images without labels, or with those of other classes, with their `label_problem`."""
    if images.label_problem is not None:
        raise DataError(images.label_problem)


def rank_within_class(labels: Int[Tensor, "images"], order: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
    """Returns how many images of its own class are before each one in this order of the images."""
    # Sorting puts the classes one after the other; the turn of an image is its position minus that of its class.
    by_class = order[labels[order].argsort(stable=True)]  # classes together, each in the given order
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    turn = torch.empty_like(labels)
    turn[by_class] = torch.arange(len(labels)) - first[labels[by_class]]
    return turn


def round_robin(labels: Int[Tensor, "images"]) -> Int[Tensor, "images"]:
    """Returns all positions going round the classes: the first image of each class, then the second, and so on."""
    # By the rank of a class, because a class number can be of any size.
    labels = labels.unique(return_inverse=True)[1]
    # Sorted by turn, and within a turn by class.
    turn = rank_within_class(labels, torch.arange(len(labels)))
    return (turn * len(labels.bincount()) + labels).argsort(stable=True)


def hold_out(
    labels: Int[Tensor, "images"], keys: Iterable[str | int], share: float, seed: int
) -> Bool[Tensor, "images"]:
    """Marks `share` of every class: the images with the lowest hash of seed and key, the same on every machine.

    At least one image of a class that has two, never the last one of a class.
    """
    # A hash instead of a random permutation: an image stays on its side when others are added or removed.
    # 7 bytes, so that a hash fits into a signed int64
    hashes = [hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=7).digest() for key in keys]
    order = torch.tensor([int.from_bytes(raw) for raw in hashes], dtype=torch.int64).argsort(stable=True)
    sizes = labels.bincount()
    wanted = (sizes * share).round().long().clamp(min=1)
    wanted = torch.where(sizes > 1, torch.minimum(wanted, sizes - 1), 0)
    return rank_within_class(labels, order) < wanted[labels]
