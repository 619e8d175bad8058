"""Validates the images that enter a model: wrong shapes and NaN raise DataError, a wrong scale gives a warning."""

import warnings

import torch
from torch import nn

from attnrx.support.errors import DataError, ScaleWarning
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.models.family import Family
from attnrx.vit.models.image_scale import ImageScale

UNKNOWN_SCALE = (
    "the scale of the images was not checked: the model has no image processor, so its normalization is unknown. "
    "Normalize them as in its training."
)


class InputValidation:
    """Validates the batches that the operation `what` passes to a model."""

    def __init__(self, model: nn.Module, family: Family, what: str):
        self.what = what
        self.shape = tuple(family.input_shape(model))
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._scale = ImageScale(*family.normalization(model))
        self._is_known = family.knows_normalization(model)
        self._warned = False

    def take(self, images: ImageBatch) -> Tensor:
        """Returns the images in the model's dtype.

        Raises:
            DataError: The images have another shape than the model's input, or contain NaN or infinity.
        """
        shape = tuple(images.shape[1:])
        if shape != self.shape:
            raise DataError(
                f"{self.what} was given images of {_by(shape)} (channels, height, width), and the model takes "
                f"{_by(self.shape)}; load the data with image_size={self.shape[1]}, or use a model for this data."
            )
        first = self._scale.images
        self._scale.observe(images)
        if not self._scale.is_finite:
            raise DataError(
                f"{self.what} was given images with NaN or infinity, at indices {first} to "
                f"{first + len(images) - 1}; remove them."
            )
        # A value that no pixel on this scale can have needs no further images; other differences do (`notes`).
        if self._scale.leaves:
            self._warn()
        return images.to(self.dtype)

    def notes(self) -> list[str]:
        """Returns a note, and warns, if the images are not on the model's scale; a note too if that is unknown."""
        if not self._scale.fits:
            return [self._warn()]
        return [] if self._is_known else [UNKNOWN_SCALE]

    def _warn(self) -> str:
        note = UNKNOWN_SCALE
        if self._is_known:
            note = (
                f"the images passed to {self.what} are not on the model's scale, which is {self._scale.describe()}. "
                "`attnrx.adapt_preprocessing(splits, model)` converts a dataset."
            )
        if not self._warned:
            self._warned = True
            warnings.warn(note, ScaleWarning, stacklevel=5)
        return note


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
