"""The handwritten digits of scikit-learn, which need no download."""

import torch

from attnrx.data.splits import Opened, StoredImages
from attnrx.support.optional import required_module
from attnrx.support.shapes import Int, Tensor, UInt8

DIGIT_SIDE, GREYS = 8, 16  # scikit-learn stores the pixels of the digits as counts, 0 to 16


def open_digits() -> Opened:
    """Returns the 1,797 handwritten digits inside scikit-learn, in its order: real data without a download."""
    images, labels = digit_images()
    return Opened({"train": stored_greys(images, labels, "digit {} of scikit-learn")}, tuple("0123456789"))


def stored_greys(
    images: UInt8[Tensor, "images height width"], labels: Int[Tensor, "images"], name: str
) -> StoredImages:
    """Returns grey images in memory, which messages call by a name with {} for the number of the image."""
    # As PGM files, so that these images take the same way as all others: a header, then the pixels.
    header = b"P5 %d %d 255\n" % (images.shape[2], images.shape[1])
    return StoredImages(
        labels, torch.arange(len(labels)), lambda at: header + images[at].numpy().tobytes(), name.format
    )


def digit_images() -> tuple[UInt8[Tensor, "digits side side"], Int[Tensor, "digits"]]:
    """Returns the pixels and the labels of scikit-learn's digits.

    Raises:
        NotSupported: scikit-learn is not installed.
    """
    digits = required_module("sklearn.datasets", "data", "the digits")
    images, labels = digits.load_digits(return_X_y=True)
    pixels = (images * 255 / GREYS).round().astype("uint8").reshape(-1, DIGIT_SIDE, DIGIT_SIDE)
    return torch.from_numpy(pixels), torch.from_numpy(labels).long()
