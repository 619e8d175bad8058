"""Images on their way into a model: refused where it cannot read them, with a warning where their scale is another."""

import warnings

import torch
from torch import nn

from attnrx.diagnostics import ImageScale
from attnrx.errors import DataError, ScaleWarning
from attnrx.models.family import Family
from attnrx.shapes import Float, Tensor


class InputValidation:
    """Checks the batches that `what` shows a model, before any work is done on them."""

    def __init__(self, model: nn.Module, family: Family, what: str):
        self.what = what
        self.shape = tuple(family.input_shape(model))
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._scale = ImageScale(*family.normalization(model))
        self._warned = False

    def take(self, images: Float[Tensor, "batch channels height width"]) -> Tensor:
        """Returns the images in the model's precision.

        Raises:
            DataError: They have another shape than the model reads, or hold NaN or infinity.
        """
        found = tuple(images.shape[1:])
        if found != self.shape:
            raise DataError(
                f"{self.what} was given images of {_by(found)} (channels, height, width), and the model reads "
                f"{_by(self.shape)}; load the data with image_size={self.shape[1]}, or take a model for this data."
            )
        first = self._scale.images
        self._scale.observe(images)
        if not self._scale.is_finite:
            raise DataError(
                f"{self.what} was given images with NaN or infinity, among those from {first} to "
                f"{first + len(images) - 1}; leave them out."
            )
        if self._scale.leaves:
            self._warn()
        return images.to(self.dtype)

    def notes(self) -> list[str]:
        """Says whether the images were on the model's scale: nothing if they were, else one note, which warns too."""
        return [] if self._scale.fits else [self._warn()]

    def _warn(self) -> str:
        note = (
            f"the images passed to {self.what} are not on the model's scale, which is {self._scale.describe()}. "
            "`attnrx.adapt_preprocessing(splits, model)` converts a dataset."
        )
        if not self._warned:
            self._warned = True
            warnings.warn(note, ScaleWarning, stacklevel=4)
        return note


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
