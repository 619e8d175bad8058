"""Nineteen ways of spoiling images at five severities, for asking how a model bears images that are not clean.

They are those of ImageNet-C, and for small images of Tiny-ImageNet-C and CIFAR-C: Hendrycks and Dietterich,
"Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019. Written here from its
definitions in PyTorch: of the packages that hold them, imagecorruptions 1.1.2 fails on three of the nineteen with
today's NumPy and scikit-image, and corrupt_tta 0.1.7, which runs them all, wants OpenCV and scikit-image. The amounts
are those of the published code; `frost` and the water of `spatter` are not what was published (each says why). The
published files were stored as JPEG of quality 85 after all, which is not done here. So a number compares models on the
same images, and is not one of the benchmark's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Tensor
from attnrx_lab.corruptions import blur, digital, noise, weather
from attnrx_lab.corruptions.filters import Draws, Images
from attnrx_lab.corruptions.severities import COMMON, EXTRA, LEVELS, Levels

SEVERITIES = (1, 2, 3, 4, 5)

METHODS: Mapping[str, Callable[[Images, Levels, Draws], Images]] = {
    name: getattr(next(room for room in (noise, blur, weather, digital) if hasattr(room, name)), name)
    for name in LEVELS
}

# Those that draw nothing, and may take images together.
STILL = frozenset(
    {"gaussian_blur", "defocus_blur", "zoom_blur", "brightness", "contrast", "saturate", "pixelate", "jpeg_compression"}
)


@dataclass(frozen=True)
class Corruption:
    """One way of spoiling images; the result stays in [0, 1] and has the same shape, type and device."""

    name: str

    def __post_init__(self):
        if self.name not in LEVELS:
            raise UnknownName("corruption", self.name, LEVELS)

    def levels(self, side: int, severity: int) -> Levels:
        """Returns the benchmark's amounts for images of this side."""
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
        """Spoils images in [0, 1]; what is random needs the generator to be repeatable, and draws image by image."""
        levels = self.levels(max(images.shape[-2:]), severity)
        method = METHODS[self.name]
        if self.name in STILL:
            return method(images, levels, generator).clamp(0, 1)
        # One by one: an image takes all its random numbers before the next, so batches of any size are corrupted alike.
        return torch.cat([method(image[None], levels, generator) for image in images]).clamp(0, 1)


CORRUPTIONS: dict[str, Corruption] = {name: Corruption(name) for name in LEVELS}
# Names for several at once: the fifteen of the benchmark, the four that it keeps for validation, and both.
CORRUPTION_GROUPS: dict[str, tuple[str, ...]] = {"common": tuple(COMMON), "extra": tuple(EXTRA), "all": tuple(LEVELS)}

__all__ = ["CORRUPTIONS", "CORRUPTION_GROUPS", "LEVELS", "SEVERITIES", "Corruption"]
