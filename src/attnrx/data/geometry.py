"""How a picture of any size becomes the square that a model reads."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from attnrx.data.augmentation import Box
from attnrx.optional import required_module
from attnrx.shapes import Tensor, UInt8

MARGIN = 256 / 224  # photographs are resized to this many times the model's size before the central crop
SMALL = 96  # sets whose pictures have no shorter side above this are resized as they are

Fit = Literal["pad", "fill", "photo"]


@dataclass(frozen=True)
class ImageGeometry:
    """The square `size` of the model's input and how a picture is fitted to it.

    `pad` puts smaller pictures between black borders (28x28 into 32x32: no pixel changes); `fill` resizes the shorter
    side to `size`; `photo` resizes it to 256/224 of that, unless the picture is smaller, so that the crop drops a rim.
    A centre crop makes it square.
    """

    size: int
    channels: int
    fit: Fit

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one fitted picture."""
        return self.channels, self.size, self.size

    def still(self, picture: UInt8[Tensor, "channels height width"]) -> UInt8[Tensor, "channels size size"]:
        """Fits a picture as evaluation does, without randomness."""
        height, width = picture.shape[-2:]
        short = min(height, width)
        wanted = self.size
        if self.fit == "photo":
            wanted = min(max(short, self.size), round(MARGIN * self.size))
        if self.fit == "pad" and max(height, width) <= self.size:
            return self._pad(picture)
        if short != wanted:
            picture = resize(
                picture,
                (max(wanted, round(height * wanted / short)), max(wanted, round(width * wanted / short))),
            )
        height, width = picture.shape[-2:]
        top, left = (height - self.size) // 2, (width - self.size) // 2
        return picture[:, top : top + self.size, left : left + self.size]

    def window(self, picture: UInt8[Tensor, "channels height width"], box: Box) -> UInt8[Tensor, "channels size size"]:
        """Resizes one window of a picture to the model's input."""
        transforms = required_module("torchvision.transforms.v2.functional", "data", "resizing images")

        return transforms.resized_crop(picture, *box, [self.size, self.size], antialias=True)

    def _pad(self, picture: UInt8[Tensor, "channels height width"]) -> UInt8[Tensor, "channels size size"]:
        height, width = picture.shape[-2:]
        top, left = (self.size - height) // 2, (self.size - width) // 2
        return torch.nn.functional.pad(picture, (left, self.size - width - left, top, self.size - height - top))


def resize(
    picture: UInt8[Tensor, "channels height width"], size: tuple[int, int]
) -> UInt8[Tensor, "channels rows columns"]:
    """Resizes with antialiased bilinear interpolation, as torchvision does."""
    return torch.nn.functional.interpolate(picture[None], size, mode="bilinear", antialias=True, align_corners=False)[0]


def guess_geometry(pictures: Sequence[UInt8[Tensor, "_ _ _"]], size: int | None) -> ImageGeometry:
    """Chooses the geometry of a dataset without a known geometry, from a few of its pictures."""
    channels = 3 if max(picture.shape[0] for picture in pictures) >= 3 else 1
    sides = [min(picture.shape[-2:]) for picture in pictures]
    if max(sides) > SMALL:
        return ImageGeometry(size or 224, channels, "photo")
    return ImageGeometry(size or Counter(sides).most_common(1)[0][0], channels, "fill")
