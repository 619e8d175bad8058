"""One split of a dataset as everything above sees it: batches, in an order that can be repeated exactly."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from attnrx.data.augmentation import Augmentation, Draws
from attnrx.data.normalization import Normalization
from attnrx.data.passes import Pass
from attnrx.errors import DataError
from attnrx.shapes import Float, Int, Tensor, UInt8

NO_LABELS = (
    "the data has no labels, and this needs them: give pairs (images, labels), or mappings with a key such as 'label'."
)


@dataclass(frozen=True)
class Batch:
    """Images on the model's scale, their labels, and `index`: the row of each in its source, for paired comparisons."""

    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch"]
    index: Int[Tensor, "batch"]

    def __len__(self) -> int:
        return len(self.labels)


class ImageSet(ABC):
    """One split. It is never consumed: every call of `batches` begins a new pass."""

    @property
    def has_labels(self) -> bool:
        """Whether every image has a label; where not, `Batch.labels` are -1."""
        return True

    @property
    def label_problem(self) -> str | None:
        """The reason why the labels cannot be compared with a model's answers; None where they can."""
        return None if self.has_labels else NO_LABELS

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of images."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short text that two sets share only if they hold the same images: name, count and a hash."""

    @abstractmethod
    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images, balanced over the classes where the labels are known beforehand."""

    @abstractmethod
    def part(self, process: int, processes: int, batch_size: int) -> "ImageSet":
        """Returns the images that one of several processes looks at: all parts, one after the other, are the set.

        Where it can be, a part is whole batches of an ordered pass over the set, so that what a model answers does not
        depend on the number of processes. A part may be empty, and then has no batches.
        """

    @abstractmethod
    def renormalized(self, normalization: Normalization) -> "ImageSet":
        """Returns the same images on another scale, for a model that was trained with other statistics."""

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
        """Returns one pass in batches, normalised, on `device`.

        Without a seed the pass is ordered and contains every image once; with one (a different one for every epoch) it
        is shuffled and drops the last incomplete batch. `batch_size` counts the images of all processes together:
        process p of N, `shard=(p, N)`, receives its part of each batch. `start` skips the first steps.
        """
        return self._pass(Pass(batch_size, seed, augmentation, torch.device(device), shard, start))


def finish(
    images: UInt8[Tensor, "batch channels height width"],
    draws: Draws | None,
    order: Pass,
    normalization: Normalization,
) -> Float[Tensor, "batch channels height width"]:
    """Augments and normalises decoded images on the device they are on."""
    if draws is not None and order.augmentation is not None:
        images = order.augmentation.apply(images, draws)
    return normalization.apply(images.float() / 255)


def rows_of_part(count: int, process: int, processes: int, batch_size: int) -> slice:
    """Returns the rows of one process's part of an ordered pass: whole batches, about as many for each process."""
    batches = -(-count // batch_size)
    first, last = (batches * number // processes * batch_size for number in (process, process + 1))
    return slice(min(first, count), min(last, count))


def digest(name: str, labels: Int[Tensor, "images"], samples: Iterable[bytes]) -> str:
    """Makes a fingerprint from the labels of all images and the content of some."""
    hashed = hashlib.sha256(f"{name}:{len(labels)}".encode())
    hashed.update(labels.cpu().numpy().tobytes())
    for sample in samples:
        hashed.update(sample)
    return f"{name}:{len(labels)}:{hashed.hexdigest()[:16]}"


def evenly_spaced(count: int, most: int = 64) -> list[int]:
    """Returns up to `most` positions spread evenly over `count`."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long().tolist()


def balanced_prefix(labels: Int[Tensor, "images"], count: int) -> Int[Tensor, "taken"]:
    """Returns `count` positions that go round the classes: the first image of each class, then the second, and so
    on."""
    if not 1 <= count <= len(labels):
        raise DataError(
            f"{count} images were requested of a split that holds {len(labels)}; ask for 1 to {len(labels)}."
        )
    by_class = labels.argsort(stable=True)
    sizes = labels.bincount()
    first = sizes.cumsum(0) - sizes
    turn = torch.empty_like(labels)
    turn[by_class] = torch.arange(len(labels)) - first[labels[by_class]]
    return (turn * len(sizes) + labels).argsort(stable=True)[:count]
