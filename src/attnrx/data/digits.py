"""The handwritten digits of scikit-learn, which need no download."""

import numpy as np
import torch

from attnrx.data.splits import DatasetReader, Opened, StoredImages
from attnrx.support.optional import required_module
from attnrx.support.shapes import Int, Tensor, UInt8

DIGIT_SIDE, GREYS = 8, 16  # scikit-learn stores the pixels of the digits as counts, 0 to 16


class DigitsReader(DatasetReader):
    """The 1,797 handwritten digits inside scikit-learn, in its order: real data without a download."""

    def open(self) -> Opened:
        images, labels = digit_images()
        pixels = images.numpy()
        stored = StoredImages(
            labels,
            torch.arange(len(labels)),
            lambda at: grey_file(pixels[at]),
            lambda at: f"digit {at} of scikit-learn",
        )
        return Opened({"train": stored}, tuple("0123456789"))


def digit_images() -> tuple[UInt8[Tensor, "digits side side"], Int[Tensor, "digits"]]:
    """Returns the pixels and the labels of scikit-learn's digits.

    Raises:
        NotSupported: scikit-learn is not installed.
    """
    digits = required_module("sklearn.datasets", "data", "the digits")
    images, labels = digits.load_digits(return_X_y=True)
    pixels = (images * 255 / GREYS).round().astype("uint8").reshape(-1, DIGIT_SIDE, DIGIT_SIDE)
    return torch.from_numpy(pixels), torch.from_numpy(labels).long()


def grey_file(pixels: np.ndarray) -> bytes:
    """Encodes the pixels [height, width] of a grey image as PGM: a header before the pixels."""
    # A file, so that these images take the same way as all others.
    height, width = pixels.shape
    return b"P5 %d %d 255\n" % (width, height) + pixels.tobytes()
