"""The affine step between pixels in [0, 1] and what a model reads."""

from dataclasses import dataclass

import torch

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Normalization:
    """Subtracts the mean and divides by the standard deviation of each channel.

    The law: `invert(apply(x)) == x` to rounding.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self):
        if not self.mean or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise InvalidInput(
                f"Normalization(mean={self.mean}, std={self.std}): give one mean and one positive std per channel."
            )

    @classmethod
    def half(cls, channels: int) -> "Normalization":
        """Returns mean = std = 0.5, the choice for data without published statistics."""
        return cls((0.5,) * channels, (0.5,) * channels)

    def apply(
        self, images: Float[Tensor, "*batch channels height width"]
    ) -> Float[Tensor, "*batch channels height width"]:
        """Takes pixels in [0, 1] to the model's scale."""
        mean, std = self._columns(images)
        return (images - mean) / std

    def invert(
        self, images: Float[Tensor, "*batch channels height width"]
    ) -> Float[Tensor, "*batch channels height width"]:
        """Takes the model's scale back to pixels in [0, 1]."""
        mean, std = self._columns(images)
        return images * std + mean

    def _columns(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if images.shape[-3] != len(self.mean):
            raise InvalidInput(
                f"images of {images.shape[-3]} channels were given to a normalization of {len(self.mean)}; "
                "use the one of the dataset they came from."
            )
        mean, std = torch.tensor([self.mean, self.std], dtype=images.dtype, device=images.device)
        return mean[:, None, None], std[:, None, None]
