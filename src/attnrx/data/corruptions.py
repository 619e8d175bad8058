"""Noise, blur, JPEG and contrast at five severities, for asking how a model bears images that are not clean.

The amounts are those of CIFAR-C, Tiny-ImageNet-C and ImageNet-C (Hendrycks and Dietterich, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations", ICLR 2019), chosen by the side of the images. All but JPEG are
tensor operations on the device of the images; JPEG goes through Pillow on the CPU, as in the benchmarks.
"""

import io
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional

from attnrx.data.decoding import decode, threads
from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Tensor

SEVERITIES = (1, 2, 3, 4, 5)

# The largest side a benchmark is meant for, and its amounts at severities 1 to 5.
# noise, blur: standard deviation (of the unit range; in pixels); jpeg: quality; contrast: factor around the mean.
AMOUNTS: Mapping[str, Mapping[float, tuple[float, ...]]] = {
    "noise": {
        32: (0.04, 0.06, 0.08, 0.09, 0.10),
        64: (0.04, 0.08, 0.12, 0.15, 0.18),
        float("inf"): (0.08, 0.12, 0.18, 0.26, 0.38),
    },
    "blur": {
        32: (0.4, 0.6, 0.7, 0.8, 1.0),
        64: (0.5, 0.75, 1.0, 1.25, 1.5),
        float("inf"): (1.0, 2.0, 3.0, 4.0, 6.0),
    },
    "jpeg": {
        32: (80, 65, 58, 50, 40),
        64: (65, 58, 50, 40, 25),
        float("inf"): (25, 18, 15, 10, 7),
    },
    "contrast": {
        32: (0.75, 0.5, 0.4, 0.3, 0.15),
        64: (0.4, 0.3, 0.2, 0.1, 0.05),
        float("inf"): (0.4, 0.3, 0.2, 0.1, 0.05),
    },
}


@dataclass(frozen=True)
class Corruption:
    """One way of spoiling images; the result stays in [0, 1] and has the same shape, type and device."""

    name: str

    def __post_init__(self):
        if self.name not in AMOUNTS:
            raise UnknownName("corruption", self.name, AMOUNTS)

    def amount(self, side: int, severity: int) -> float:
        """Gives the benchmark's amount for images of this side."""
        if severity not in SEVERITIES:
            raise InvalidInput(f"severity {severity} of {self.name}: choose 1 (mildest) to 5.")
        amounts = AMOUNTS[self.name]
        return float(amounts[next(limit for limit in sorted(amounts) if side <= limit)][severity - 1])

    def __call__(
        self,
        images: Float[Tensor, "batch channels height width"],
        severity: int,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "batch channels height width"]:
        """Spoils images in [0, 1]; only noise is random, and needs the generator to be repeatable."""
        amount = self.amount(max(images.shape[-2:]), severity)
        return METHODS[self.name](images, amount, generator).clamp(0, 1)


def _noise(images: Tensor, deviation: float, generator: torch.Generator | None) -> Tensor:
    """Adds Gaussian noise, drawn where the generator lives, so that a CPU generator gives every device the same."""
    device = generator.device if generator is not None else images.device
    noise = torch.randn(images.shape, generator=generator, device=device, dtype=images.dtype)
    return images + deviation * noise.to(images.device)


def _blur(images: Tensor, deviation: float, _: torch.Generator | None) -> Tensor:
    """Convolves rows, then columns, with a Gaussian cut at four deviations; the border repeats its last pixel."""
    radius = int(4 * deviation + 0.5)
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (offsets / deviation) ** 2)
    kernel = kernel / kernel.sum()
    batch, channels, height, width = images.shape
    planes = functional.pad(images, (radius,) * 4, mode="replicate").reshape(
        batch * channels, 1, height + 2 * radius, -1
    )
    planes = functional.conv2d(functional.conv2d(planes, kernel[None, None, :, None]), kernel[None, None, None, :])
    return planes.reshape(batch, channels, height, width)


def _contrast(images: Tensor, factor: float, _: torch.Generator | None) -> Tensor:
    """Moves every pixel towards the mean of its image and channel."""
    mean = images.mean(dim=(-2, -1), keepdim=True)
    return mean + factor * (images - mean)


def _jpeg(images: Tensor, quality: float, _: torch.Generator | None) -> Tensor:
    """Encodes and decodes every image as JPEG, several at once."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    with ThreadPoolExecutor(threads()) as pool:
        spoilt = list(pool.map(lambda image: _through_jpeg(image, int(quality)), pixels))
    return torch.stack(spoilt).to(images.device, images.dtype) / 255


def _through_jpeg(image: Tensor, quality: int) -> Tensor:
    from PIL import Image

    file = io.BytesIO()
    plane = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
    Image.fromarray(plane.numpy()).save(file, format="JPEG", quality=quality)
    return decode(file.getvalue(), image.shape[0])


METHODS: Mapping[str, Callable[[Tensor, float, torch.Generator | None], Tensor]] = {
    "noise": _noise,
    "blur": _blur,
    "jpeg": _jpeg,
    "contrast": _contrast,
}

CORRUPTIONS: dict[str, Corruption] = {name: Corruption(name) for name in METHODS}
