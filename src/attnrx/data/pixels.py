"""The pixels of datasets: decoding of many pictures, the geometry of unknown data, and augmentation."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnrx.support.arguments import require_fields, whole
from attnrx.support.errors import InvalidInput
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import ImageGeometry, without_waiting
from attnrx.support.shapes import Bool, Float, Int, Tensor, UInt8

Box = tuple[int, int, int, int]  # top, left, height, width

SMALL = 96  # sets whose pictures have no shorter side above this are resized as they are
ATTEMPTS = 10  # tries at a crop that fits inside the picture, as torchvision's RandomResizedCrop makes
RATIO = (3 / 4, 4 / 3)  # widths over heights that such a crop may have


def threads() -> int:
    """Returns how many images are decoded at once: decoding releases the GIL, so one thread per usable core."""
    # macOS and Windows have no sched_getaffinity; above 16 threads memory bandwidth is the limit.
    return max(1, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def guess_geometry(pictures: Sequence[UInt8[Tensor, "_ _ _"]], size: int | tuple[int, int] | None) -> ImageGeometry:
    """Chooses the geometry of a dataset without a known geometry, from a few of its pictures."""
    channels = 3 if max(picture.shape[0] for picture in pictures) >= 3 else 1
    sides = [min(picture.shape[-2:]) for picture in pictures]
    if max(sides) > SMALL:
        return ImageGeometry.of_size(size or 224, channels, "photo")
    return ImageGeometry.of_size(size or Counter(sides).most_common(1)[0][0], channels, "fill")


def random_window(
    picture: UInt8[Tensor, "channels height width"], box: Box, size: tuple[int, int]
) -> UInt8[Tensor, "channels rows columns"]:
    """Resizes a window of a picture to `size`, for augmentation.

    Raises:
        NotSupported: torchvision is not installed.
    """
    transforms = required_module("torchvision.transforms.v2.functional", "data", "resizing images")
    return transforms.resized_crop(picture, *box, list(size), antialias=True)


@dataclass(frozen=True)
class Draws:
    """The random numbers of one batch: drawn on the CPU, so that every device and every process sees the same."""

    shift: Int[Tensor, "batch 2"]
    mirror: Bool[Tensor, "batch"]
    window: Float[Tensor, "batch attempts 4"]

    def part(self, images: slice | list[int]) -> "Draws":
        """Returns the random numbers of some images of the batch."""
        return Draws(self.shift[images], self.mirror[images], self.window[images])


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


def padding_for(geometry: ImageGeometry) -> int:
    """Returns the padding of `Augmentation`: an eighth of the side, the usual 4 pixels at 32 x 32."""
    return max(geometry.size) // 8
