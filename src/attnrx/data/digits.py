"""The 1,797 handwritten digits inside scikit-learn: real data without a download."""

import torch

from attnrx.data.stored import DatasetReader, Opened, StoredImages
from attnrx.optional import required_module
from attnrx.shapes import Int, Tensor, UInt8

GREYS = 16  # scikit-learn stores the pixels as counts, 0 to 16


class DigitImages(StoredImages):
    """Digits, which are stored as pixels."""

    def __init__(self, pixels: UInt8[Tensor, "images 1 height width"], labels: Int[Tensor, "images"]):
        self.labels = labels
        self.sources = torch.arange(len(labels))
        self._pixels = pixels

    def content(self, position: int) -> bytes:
        return self._pixels[position].numpy().tobytes()

    def where(self, position: int) -> str:
        return f"digit {position} of scikit-learn"

    def picture(self, position: int, channels: int | None) -> UInt8[Tensor, "channels height width"]:
        return self._pixels[position].expand(channels or 1, -1, -1)


class DigitsReader(DatasetReader):
    """The digits, in scikit-learn's order."""

    def identity(self) -> str:
        return "digits"

    def open(self) -> Opened:
        digits = required_module("sklearn.datasets", "data", "the digits")
        images, labels = digits.load_digits(return_X_y=True)
        pixels = torch.from_numpy(images * 255 / GREYS).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        return Opened({"train": DigitImages(pixels, torch.from_numpy(labels).long())}, tuple("0123456789"))
