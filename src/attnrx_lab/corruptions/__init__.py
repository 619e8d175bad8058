"""Nineteen image corruptions at five severity levels, for robustness checks.

The corruptions follow ImageNet-C and, for small images, Tiny-ImageNet-C and CIFAR-C (Hendrycks and Dietterich,
"Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR 2019). We implement the
benchmark's definitions with NumPy, SciPy and Pillow. The severity levels follow the published code. `frost` and the
water of `spatter` differ from the published code, as their docstrings say. The benchmark's images were also compressed
as JPEG files of quality 85, but our images are not. So you can compare models with each other on our images, but you
cannot compare their results with published results.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.optional import required_module
from attnrx.support.shapes import Float, Tensor
from attnrx_lab.corruptions.severities import LEVELS, SIDES, Level

SEVERITIES = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Corruption:
    """An image corruption. Corrupted images have values in [0, 1], and the shape, dtype and device of the input."""

    name: str

    def __post_init__(self):
        if self.name not in LEVELS:
            raise UnknownName("corruption", self.name, LEVELS)

    def levels(self, side: int, severity: int) -> Level:
        """Returns the benchmark's parameters for a severity level and an image size (the longer side in pixels).

        Raises:
            InvalidInput: The severity is not a whole number from 1 to 5.
        """
        if severity not in SEVERITIES:
            raise InvalidInput(f"severity {severity} of {self.name}: choose 1 (mildest) to 5.")
        # LEVELS has three entries per corruption, for sides up to 32, for sides up to 64, and for larger sides.
        level = LEVELS[self.name][bisect_left(SIDES, side)][severity - 1]
        return level if isinstance(level, tuple) else (level,)

    def __call__(
        self,
        images: Float[Tensor, "batch channels height width"],
        severity: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch channels height width"]:
        """Corrupts images with values in [0, 1]. The generator draws a separate seed for every image."""
        levels = self.levels(max(images.shape[-2:]), severity)
        methods = required_module("attnrx_lab.corruptions.methods", "lab", f"the corruption {self.name}")
        corrupted = []
        for image in images.double().cpu().numpy():
            # Each image has a separate seed, so the result does not depend on the batch size.
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device if generator else None))
            pixels = getattr(methods, self.name)(image, np.random.default_rng(seed), *levels)
            corrupted.append(torch.from_numpy(pixels).clamp(0, 1))
        return torch.stack(corrupted).to(images)


CORRUPTIONS: dict[str, Corruption] = {name: Corruption(name) for name in LEVELS}
# The groups: the benchmark's fifteen corruptions, its four validation corruptions, and both.
CORRUPTION_GROUPS: dict[str, tuple[str, ...]] = {
    "common": tuple(LEVELS)[:15],
    "extra": tuple(LEVELS)[15:],
    "all": tuple(LEVELS),
}

__all__ = ["CORRUPTIONS", "CORRUPTION_GROUPS", "LEVELS", "SEVERITIES", "Corruption"]
