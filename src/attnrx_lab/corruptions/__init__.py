"""Nineteen image corruptions at five severity levels, for robustness checks.

They are those of ImageNet-C, and for small images of Tiny-ImageNet-C and CIFAR-C: Hendrycks and Dietterich,
"Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019. Written from its
definitions in PyTorch: of the libraries that provide them, imagecorruptions 1.1.2 fails on three of the nineteen with
today's NumPy and scikit-image, and corrupt_tta 0.1.7, which runs them all, needs OpenCV and scikit-image. The severity
levels are those of the published code; `frost` and the water of `spatter` differ from it (see there). The published
files were stored as JPEG of quality 85, which is not done here. So the numbers compare models on the same images and
are not those of the benchmark.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Tensor
from attnrx_lab.corruptions import methods
from attnrx_lab.corruptions.filters import Draws, Images
from attnrx_lab.corruptions.severities import COMMON, EXTRA, LEVELS, Levels

SEVERITIES = (1, 2, 3, 4, 5)

METHODS: Mapping[str, Callable[[Images, Levels, Draws], Images]] = {name: getattr(methods, name) for name in LEVELS}

# Deterministic corruptions, which process a batch at once.
STILL = frozenset(
    {"gaussian_blur", "defocus_blur", "zoom_blur", "brightness", "contrast", "saturate", "pixelate", "jpeg_compression"}
)


@dataclass(frozen=True)
class Corruption:
    """One corruption; the result is in [0, 1] and has the same shape, type and device."""

    name: str

    def __post_init__(self):
        if self.name not in LEVELS:
            raise UnknownName("corruption", self.name, LEVELS)

    def levels(self, side: int, severity: int) -> Levels:
        """Returns the benchmark's severity levels for images of this side."""
        if severity not in SEVERITIES:
            raise InvalidInput(f"severity {severity} of {self.name}: choose 1 (mildest) to 5.")
        levels = LEVELS[self.name]
        return levels[next(limit for limit in sorted(levels) if side <= limit)][severity - 1]

    def __call__(
        self,
        images: Float[Tensor, "batch channels height width"],
        severity: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch channels height width"]:
        """Corrupts images in [0, 1]; random corruptions need the generator, and draw image by image."""
        levels = self.levels(max(images.shape[-2:]), severity)
        method = METHODS[self.name]
        if self.name in STILL:
            return method(images, levels, generator).clamp(0, 1)
        # Image by image: each draws all its random numbers before the next, so the result does not depend on the batch
        # size.
        return torch.cat([method(image[None], levels, generator) for image in images]).clamp(0, 1)


CORRUPTIONS: dict[str, Corruption] = {name: Corruption(name) for name in LEVELS}
# Groups: the fifteen of the benchmark, its four validation corruptions, and both.
CORRUPTION_GROUPS: dict[str, tuple[str, ...]] = {"common": tuple(COMMON), "extra": tuple(EXTRA), "all": tuple(LEVELS)}

__all__ = ["CORRUPTIONS", "CORRUPTION_GROUPS", "LEVELS", "SEVERITIES", "Corruption"]
