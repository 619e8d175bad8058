"""Splits of small images: decoded once, held as uint8, cropped and mirrored in batches on the device."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attnrx.data.images import Batch, ImageSet, balanced_prefix, digest, evenly_spaced, finish, rows_of_part
from attnrx.data.normalization import Normalization
from attnrx.data.passes import Pass
from attnrx.errors import InvalidInput
from attnrx.shapes import Int, Tensor, UInt8


class PixelStore:
    """The decoded images of a source: held once however many splits look at them, copied once to each device."""

    def __init__(
        self,
        pixels: UInt8[Tensor, "stored channels height width"],
        labels: Int[Tensor, "stored"],
        sources: Int[Tensor, "stored"],
    ):
        self.labels = labels
        self._sources = sources
        self._copies = {torch.device("cpu"): (pixels, labels, sources)}

    def __len__(self) -> int:
        return len(self.labels)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the pixels, labels and source rows on a device, copying them the first time."""
        if device not in self._copies:
            pixels, labels, sources = self._copies[torch.device("cpu")]
            self._copies[device] = (pixels.to(device), labels.to(device), sources.to(device))
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class MemoryImages(ImageSet):
    """Some rows of a pixel store."""

    name: str
    store: PixelStore
    rows: Int[Tensor, "images"]
    normalization: Normalization

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        """Hashes every label and up to 64 images."""
        pixels, labels, _ = self.store.on(torch.device("cpu"))
        return digest(
            self.name, labels[self.rows], (pixels[self.rows[i]].numpy().tobytes() for i in evenly_spaced(len(self)))
        )

    def take(self, count: int) -> "ImageSet":
        """Returns the first `count` images going round the classes."""
        return replace(self, rows=self.rows[balanced_prefix(self.store.labels[self.rows], count)])

    def part(self, process: int, processes: int, batch_size: int) -> "ImageSet":
        """Returns whole batches of an ordered pass."""
        return replace(self, rows=self.rows[rows_of_part(len(self), process, processes, batch_size)])

    def renormalized(self, normalization: Normalization) -> "ImageSet":
        """Returns the same images on another scale."""
        return replace(self, normalization=normalization)

    def _pass(self, order: Pass) -> Iterator[Batch]:
        if order.augmentation is not None and order.augmentation.area is not None:
            raise InvalidInput(
                f"Augmentation(area={order.augmentation.area}) crops whole pictures, but {self.name} is held decoded; "
                "use padding instead."
            )
        pixels, labels, sources = self.store.on(order.device)
        for step in order.steps(len(self)):
            rows = self.rows[step.positions].to(order.device)
            draws = order.draws(step.number, step.size, step.share)
            yield Batch(finish(pixels[rows], draws, order, self.normalization), labels[rows], sources[rows])


def from_tensors(
    name: str,
    pixels: UInt8[Tensor, "images channels height width"],
    labels: Int[Tensor, "images"],
    normalization: Normalization,
) -> MemoryImages:
    """Makes an image set of pixels that are in memory already."""
    if len(pixels) != len(labels) or not len(pixels):
        raise InvalidInput(
            f"{name}: {len(pixels)} images and {len(labels)} labels; give one label for each, at least one."
        )
    rows = torch.arange(len(labels))
    return MemoryImages(name, PixelStore(pixels, labels, rows), rows, normalization)
