"""The dataset cluttered-digits, in which only a few patches of each image matter, and these patches are known.

Every image is a canvas of 10 x 10 patches. One of scikit-learn's digits covers 2 x 2 patches at a random position. Each
other patch contains, with probability one half, a fragment of another digit at half the contrast. The splits share no
digits, neither as objects nor as fragments. An entry point of the group `attnrx.parts` registers the dataset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from attnrx.data import DATASETS, DatasetCard, Normalization
from attnrx.data.formats import Opened
from attnrx.data.images import hold_out
from attnrx.data.loading import DIGIT_SIDE, digit_images, stored_greys
from attnrx.support.errors import UnknownName
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import Bool, Int, Tensor, UInt8

CLUTTERED = "cluttered-digits"
PATCH, GRID = 4, 10  # the side of a patch in pixels, and the side of an image in patches
SPAN = DIGIT_SIDE // PATCH  # the side of a digit in patches
CLUTTER, CONTRAST = 0.5, 0.5  # the share of the other patches with a fragment, and the fragment's brightness
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1  # the shares of every class's digits in the two splits
# How many images are made from every digit of a split.
PLACEMENTS: Mapping[str, int] = {"train": 6, "validation": 4, "test": 12}
NOTE = (
    f"each test digit occurs in {PLACEMENTS['test']} images, at other places among other clutter; intervals treat the "
    "images as independent"
)


@dataclass(frozen=True, eq=False)
class Canvases:
    """The images of one split.

    `digits` contains the index of each image's digit in scikit-learn's dataset. `objects` is a mask of its patches.
    """

    pixels: UInt8[Tensor, "images height width"]
    labels: Int[Tensor, "images"]
    digits: Int[Tensor, "images"]
    objects: Bool[Tensor, "images patches"]


def open_cluttered_digits(seed: int = 0) -> Opened:
    """Generates the images of all splits. The same seed produces the same images on every machine."""
    made = {split: canvases(split, seed) for split in PLACEMENTS}
    splits = {split: stored_greys(each.pixels, each.labels, "cluttered digit {}") for split, each in made.items()}
    return Opened(splits, tuple("0123456789"), (NOTE,))


def object_patches(split: str) -> Bool[Tensor, "images patches"]:
    """Returns a mask of the digit's four patches for every image in a split of `load_data("cluttered-digits")`.

    Patches are numbered row by row. Row i of the mask belongs to the image with `Batch.index` i.

    Raises:
        UnknownName: There is no such split.
    """
    return canvases(split).objects


@cache
def canvases(split: str, seed: int = 0) -> Canvases:
    """Generates the images of one split: "train", "validation" or "test".

    Raises:
        UnknownName: There is no such split.
        NotSupported: scikit-learn, which provides the digits, is not installed.
    """
    if split not in PLACEMENTS:
        raise UnknownName("split", split, PLACEMENTS)
    images, labels = digit_images()
    rows = _rows_by_split(labels)[split]
    # Every split has a separate generator, so its images do not depend on the splits that were generated before.
    random = np.random.default_rng((seed, list(PLACEMENTS).index(split)))
    digits = torch.arange(len(rows)).repeat(PLACEMENTS[split])
    objects = _places(len(digits), random)
    patches = _fragments(images[rows].numpy(), digits.numpy(), random)
    # [digits, 4, 4, 4]: the patches of every digit, row by row. The mask below assigns them in this order.
    quarters = images[rows].unflatten(2, (SPAN, PATCH)).unflatten(1, (SPAN, PATCH)).transpose(2, 3).flatten(1, 2)
    patches[objects] = quarters.numpy()[digits].reshape(-1, PATCH, PATCH)
    pixels = patches.reshape(-1, GRID, GRID, PATCH, PATCH).swapaxes(2, 3).reshape(-1, GRID * PATCH, GRID * PATCH)
    return Canvases(torch.from_numpy(pixels), labels[rows][digits], rows[digits], torch.from_numpy(objects))


def _rows_by_split(labels: Tensor) -> dict[str, Tensor]:
    """Returns the indices of each split's digits in scikit-learn's dataset. The splits are stratified by class."""
    is_test = hold_out(labels, range(len(labels)), TEST_SHARE, seed=0)
    rest = (~is_test).nonzero().flatten()
    # VALIDATION_SHARE is a share of all digits, but `rest` contains no test digits.
    is_validation = hold_out(labels[rest], rest.tolist(), VALIDATION_SHARE / (1 - TEST_SHARE), seed=1)
    return {"train": rest[~is_validation], "validation": rest[is_validation], "test": is_test.nonzero().flatten()}


def _places(count: int, random: np.random.Generator) -> np.ndarray:
    """Draws the position of the digit in every image. Returns a mask of the digit's patches, [images, patches]."""
    # [images, row or column, 1]: the digit's first patch. The range leaves room for SPAN patches.
    corners = random.integers(0, GRID - SPAN + 1, (count, 2, 1))
    row, column = np.moveaxis((np.arange(GRID) >= corners) & (np.arange(GRID) < corners + SPAN), 1, 0)
    return (row[:, :, None] & column[:, None, :]).reshape(count, -1)


def _fragments(images: np.ndarray, digits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draws clutter for all patches, [images, patches, 4, 4]. About half of the patches show part of another digit.

    `images`, [digits, 8, 8], contains the digits of the split. `digits`, [images], is the index of each image's own
    digit. A fragment is a random window of another digit. The window avoids the outermost columns, which are mostly
    blank.
    """
    shape = len(digits), GRID * GRID
    # The offset is at least 1 and less than the number of digits, so the other digit always differs from the image's.
    others = (digits[:, None] + random.integers(1, len(images), shape)) % len(images)
    top, left = (random.integers(edge, DIGIT_SIDE - PATCH - edge + 1, shape) for edge in (0, 1))
    windows = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), (1, 2))[others, top, left]
    brightness = np.where(random.random(shape) < CLUTTER, CONTRAST, 0)
    return (brightness[..., None, None] * windows).astype(np.uint8)


DATASETS.register(
    DatasetCard(
        geometry=ImageGeometry.of_size(GRID * PATCH, 1, "fill"),
        normalization=Normalization((0.1268,), (0.1959,)),
        flip=False,
        shift=False,  # fragments fill whole patches
        open=open_cluttered_digits,
    ),
    CLUTTERED,
)
