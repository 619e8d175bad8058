"""The 1,797 handwritten digits that come inside scikit-learn: real data without a download."""

import torch

from attnrx.data.readers.reader import Opened, Reader, Records
from attnrx.shapes import Int, Tensor, UInt8

GREYS = 16  # scikit-learn stores the pixels as counts, 0 to 16


class DigitRecords(Records):
    """Digits that are already pixels."""

    def __init__(self, pixels: UInt8[Tensor, "images 1 height width"], labels: Int[Tensor, "images"]):
        self.labels = labels
        self.sources = torch.arange(len(labels))
        self._pixels = pixels

    def content(self, position: int) -> bytes:
        """Returns the pixels of one digit."""
        return self._pixels[position].numpy().tobytes()

    def where(self, position: int) -> str:
        """Names one digit."""
        return f"digit {position} of scikit-learn"

    def picture(self, position: int, channels: int | None) -> UInt8[Tensor, "channels height width"]:
        """Returns one digit, which needs no decoding."""
        return self._pixels[position].expand(channels or 1, -1, -1)


class DigitsReader(Reader):
    """The digits, in the order scikit-learn has them."""

    def identity(self) -> str:
        """Names the digits, which never change."""
        return "digits"

    def open(self) -> Opened:
        """Reads them and stretches the greys to 0..255."""
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        pixels = torch.from_numpy(images * 255 / GREYS).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        return Opened({"train": DigitRecords(pixels, torch.from_numpy(labels).long())}, tuple("0123456789"))
