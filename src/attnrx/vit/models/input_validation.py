"""Validates a model's input images. Wrong shapes and NaN raise DataError, and a wrong scale causes a warning."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from attnrx.support.errors import DataError, ScaleWarning
from attnrx.support.preprocessing import IMAGENET
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.models.family import Family

# For the test, images are converted back to pixels with the model's mean and std. If both are right, pixels are in
# [0, 1], and four or more images always filled over 0.95 of this range. We measured this on ImageNette, Tiny-ImageNet,
# CIFAR-10, FashionMNIST and the digits. With a wrong mean or std, pixels exceed the range by 0.5 or more (e.g.
# unnormalized bytes, or ImageNet's values instead of 0.5), or fill little of it. If 0.5 replaces ImageNet's or CLIP's
# values, they fill at most 0.62. If the images are not normalized, they fill at most 0.5.
#
# Means and standard deviations of the images would distinguish scales less well. On the right scale, eight such images
# have standard deviations from 0.18 to 0.40, and half of this range also occurs on wrong scales. Scales as close as
# ImageNet's and CIFAR-10's (0.01 to 0.96) are not distinguished, but confusing them changes little.
OUTSIDE, FILLED = 0.1, 0.8
FEW = 4  # fewer images may be dark or pale although their scale is right

# Other common scales: the mean and std by which pixels in [0, 1] were normalized.
COMMON = {
    "pixels in [0, 1] that were not normalized": (0.0, 1.0),
    "pixels in 0 to 255": (0.0, 1 / 255),
    "pixels normalized with mean and std 0.5": (0.5, 0.5),
    "pixels normalized with the mean and std of ImageNet": IMAGENET,
}
UNKNOWN_SCALE = (
    "the scale of the images was not checked: the model has no image processor, so its normalization is unknown. "
    "Normalize them as in its training."
)

SHOWN = 5  # the most images that a message lists


class InputValidation:
    """Validates batches of images before a model runs on them. `what` names the operation in error messages."""

    def __init__(self, model: nn.Module, family: Family, what: str):
        self.what = what
        self.shape = tuple(family.input_shape(model))
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._scale = ImageScale(*family.normalization(model))
        self._is_known = family.knows_normalization(model)
        self._has_scale = getattr(family.inputs(model), "is_plain", True)  # False if tensors are packed into one

    def take(self, images: ImageBatch) -> Tensor:
        """Returns the images in the model's dtype.

        Raises:
            DataError: The images do not have the model's input shape, or contain NaN or infinity.
        """
        shape = tuple(images.shape[1:])
        if shape != self.shape:
            _, height, width = self.shape
            size = height if height == width else (height, width)
            remedy = "use a model for this data"
            if len(shape) == 3 and shape[0] == self.shape[0]:
                remedy = f"the model for this data: attnrx.load(model, image_size={shape[1:]})"
            require_channels_first(shape, self.shape, f"{self.what} was given")
            raise DataError(
                f"{self.what} was given images of {_by(shape)} (channels, height, width), and the model takes "
                f"{_by(self.shape)}; load the data with image_size={size}, or {remedy}."
            )
        first = self._scale.images
        self._scale.observe(images)
        if not self._scale.is_finite:
            bad = (first + (~images.isfinite()).flatten(1).any(1).nonzero()[:, 0]).tolist()
            others = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
            raise DataError(
                f"{self.what} was given images with NaN or infinity: {', '.join(map(str, bad[:SHOWN]))}{others}, "
                "counted from 0; remove them."
            )
        return images.to(self.dtype)

    def notes(self) -> list[str]:
        """Returns a note if the right image scale is unknown or does not fit the images. Also warns about a misfit."""
        if not self._has_scale or (self._is_known and self._scale.fits):
            return []
        note = UNKNOWN_SCALE
        if self._is_known:
            note = (
                f"the images passed to {self.what} are not on the model's scale, which is {self._scale.describe()}. "
                "`attnrx.adapt_preprocessing(splits, model)` converts a dataset."
            )
        if not self._scale.fits:
            warnings.warn(note, ScaleWarning, stacklevel=4)
        return [note]


def require_channels_first(shape: Sequence[int], expected: Sequence[int], whose: str) -> None:
    """Raises DataError if images have their channels last, but would fit the model with their channels first."""
    if len(shape) == 3 and (shape[2], *shape[:2]) == tuple(expected) != tuple(shape):
        raise DataError(
            f"{whose} images of {_by(shape)}, and the model takes {_by(expected)} (channels, height, width): move the "
            "channels to the front, images.permute(0, 3, 1, 2)."
        )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


class ImageScale:
    """Tracks the range of image values, to check that images are (pixels - `mean`) / `std`, with pixels in [0, 1]."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]):
        self.mean, self.std = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        self.images = 0
        # [low or high, channels]. The range is empty at first, and the first images replace it.
        self._ends = torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float64).expand(2, len(mean)).clone()

    def observe(self, images: ImageBatch) -> None:
        channels = images.detach().transpose(0, 1).flatten(1)
        low, high = (end.double().cpu() for end in channels.aminmax(dim=-1))
        self._ends = torch.stack([torch.minimum(self._ends[0], low), torch.maximum(self._ends[1], high)])
        self.images += len(images)

    @property
    def is_finite(self) -> bool:
        return not self.images or bool(self._ends.isfinite().all())

    @property
    def fits(self) -> bool:
        """Whether the images match this scale, and match no other known scale better."""
        # Images that fill little of this scale's range are refused only if they fill [0, 1] on another known scale.
        holds, filled = self._fit(self.mean, self.std)
        return not self.images or (holds and (self.images < FEW or filled or not self._explanations()))

    def describe(self) -> str:
        """Describes the expected scale, the images' range of values, and other scales that match the images."""
        mean, std = (", ".join(f"{value:.3g}" for value in values.tolist()) for values in (self.mean, self.std))
        low, high, looks = float(self._ends[0].min()), float(self._ends[1].max()), " or ".join(self._explanations())
        return (
            f"pixels in [0, 1] less {mean}, by {std}; in units of that std the {self.images} images have values from "
            f"{low:.3g} to {high:.3g}" + (f". They look like {looks}" if looks else "")
        )

    def _explanations(self) -> list[str]:
        """Returns the names of common image scales that would explain the values: pixels then fill the range [0, 1]."""
        scales = {name: [torch.tensor(values, dtype=torch.float64) for values in COMMON[name]] for name in COMMON}
        fitting = {name: scale for name, scale in scales.items() if scale[0].numel() in (1, len(self.mean))}
        return [name for name, scale in fitting.items() if all(self._fit(*scale))]

    def _fit(self, mean: Tensor, std: Tensor) -> tuple[bool, bool]:
        """Converts the images to pixels. Returns whether the pixels lie in [0, 1], and whether they fill this range."""
        pixels = self._ends * std + mean
        low, high = float(pixels[0].min()), float(pixels[1].max())
        return low >= -OUTSIDE and high <= 1 + OUTSIDE, high - low >= FILLED
