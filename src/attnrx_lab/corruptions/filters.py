"""Building blocks of corruptions: random fields per image, smoothing, shifts and fractal landscapes.

Smoothing and resampling along one side of an image are one matrix, so every border rule is exact at any size.
"""

import math
from functools import lru_cache

import torch

from attnrx.shapes import Float, Int, Tensor

Draws = torch.Generator | None
Images = Float[Tensor, "batch channels height width"]
Layer = Float[Tensor, "batch 1 height width"]


def normal(images: Tensor, shape: tuple[int, ...], draws: Draws) -> Float[Tensor, "batch ..."]:
    """Returns standard normal numbers of a shape for every image, drawn image by image.

    They are drawn on the device of the generator, so that a CPU generator gives the same numbers for every device and
    batch size.
    """
    device = images.device if draws is None else draws.device
    drawn = [torch.randn(shape, generator=draws, device=device, dtype=images.dtype) for _ in images]
    return torch.stack(drawn).to(images.device)


def uniform_noise(
    images: Tensor, shape: tuple[int, ...], draws: Draws, low: int | float = 0, high: int | float = 1
) -> Tensor:
    """Returns uniform numbers between two ends, drawn in the same way."""
    device = images.device if draws is None else draws.device
    drawn = [torch.rand(shape, generator=draws, device=device, dtype=images.dtype) for _ in images]
    return low + (high - low) * torch.stack(drawn).to(images.device)


def smoothed(images: Images, deviation: int | float, *, border: str = "nearest", truncate: int | float = 4.0) -> Images:
    """Convolves rows and columns with a Gaussian of this standard deviation in pixels, cut at `truncate` deviations.

    Beyond the border the last pixel is repeated ("nearest"), or the image is mirrored with the last pixel twice
    ("reflect").
    """
    rows, columns = (_gaussian(side, deviation, border, truncate).to(images) for side in images.shape[-2:])
    return rows @ images @ columns.T


@lru_cache(maxsize=64)
def _gaussian(side: int, deviation: int | float, border: str, truncate: int | float) -> Float[Tensor, "side side"]:
    radius = int(truncate * deviation + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets / max(deviation, 1e-9)).double() ** 2)
    taken = torch.arange(side)[:, None] + offsets
    inside = taken.clamp(0, side - 1) if border == "nearest" else _mirrored(taken, side)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    return matrix.scatter_add_(1, inside, (weights / weights.sum()).expand(side, -1).contiguous())


def _mirrored(coordinates: Int[Tensor, "*any"], side: int) -> Int[Tensor, "*any"]:
    """Mirrors indices beyond the border, with the last pixel twice."""
    folded = coordinates % (2 * side)
    return torch.minimum(folded, 2 * side - 1 - folded)


def padded(images: Images, margin: int, border: str) -> Float[Tensor, "batch channels taller wider"]:
    """Adds a margin of any width: the last pixel repeated ("nearest"), or the image mirrored in it ("mirror")."""
    for axis in (-2, -1):
        side = images.shape[axis]
        coordinates = torch.arange(-margin, side + margin, device=images.device)
        if border == "nearest":
            inside = coordinates.clamp(0, side - 1)
        else:
            folded = coordinates % max(2 * side - 2, 1)
            inside = torch.minimum(folded, (2 * side - 2 - folded).abs())
        images = images.index_select(axis, inside)
    return images


@lru_cache(maxsize=64)
def box(before: int, after: int) -> Float[Tensor, "after before"]:
    """Resamples one side with a box, as Pillow's BOX does: the mean of the pixels whose centres lie in it."""
    scale = before / after
    support = max(scale, 1.0) / 2
    centres = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(before, dtype=torch.float64) + 0.5 - centres[:, None]) / (2 * support)
    weights = ((distance > -0.5) & (distance <= 0.5)).double()
    return weights / weights.sum(1, keepdim=True)


def zoomed(images: Images, factor: int | float) -> Images:
    """Enlarges the middle of the images, linearly, to their own size."""
    height, width = images.shape[-2:]
    crops = [math.ceil(side / factor) for side in (height, width)]
    top, left = (height - crops[0]) // 2, (width - crops[1]) // 2
    middle = images[..., top : top + crops[0], left : left + crops[1]]
    sides = [round(crop * factor) for crop in crops]
    large = torch.nn.functional.interpolate(middle, size=sides, mode="bilinear", align_corners=True)
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    return large[..., top : top + height, left : left + width]


def streaked(images: Images, radius: int, deviation: int | float, degrees: Float[Tensor, "batch"]) -> Images:
    """Smears every image along its own direction with half a Gaussian of 2 radius + 1 steps, as ImageMagick does."""
    steps = torch.arange(2 * radius + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (steps / deviation) ** 2)
    weights = (weights / weights.sum()).tolist()
    margin = 2 * radius
    height, width = images.shape[-2:]
    wide, smeared = padded(images, margin, "nearest"), torch.zeros_like(images)
    for image, angle in enumerate(degrees.double().deg2rad().tolist()):
        for step, weight in enumerate(weights):
            down = margin + math.ceil(step * math.sin(angle) - 0.5)
            right = margin + math.ceil(step * math.cos(angle) - 0.5)
            smeared[image] += weight * wide[image, :, down : down + height, right : right + width]
    return smeared


def landscapes(images: Images, decay: int | float, draws: Draws) -> Layer:
    """Draws a fractal landscape between 0 and 1 for every image, by diamonds and squares on a torus.

    The heights are drawn within an amplitude that falls by the square of `decay` from one scale to the next.
    """
    side = 1 << (max(images.shape[-2:]) - 1).bit_length()
    heights = images.new_zeros(len(images), side, side)
    stride, amplitude = side, 1.0
    while stride >= 2:
        half = stride // 2
        count = side // stride
        drawn = amplitude * uniform_noise(images, (3, count, count), draws, -1, 1)
        corners = heights[:, ::stride, ::stride]
        below = corners.roll(-1, 1)
        centres = (corners + below + (corners + below).roll(-1, 2)) / 4 + drawn[:, 0]
        beside = (corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)) / 4 + drawn[:, 1]
        under = (corners + below + centres + centres.roll(1, 2)) / 4 + drawn[:, 2]
        heights[:, half::stride, half::stride] = centres
        heights[:, ::stride, half::stride] = beside
        heights[:, half::stride, ::stride] = under
        stride, amplitude = half, amplitude / decay**2
    low, high = heights.amin((1, 2), keepdim=True), heights.amax((1, 2), keepdim=True)
    flat = (heights - low) / (high - low)
    return flat[:, None, : images.shape[-2], : images.shape[-1]]


def grey(images: Images) -> Layer:
    """Returns the luma of images with one channel or three."""
    if images.shape[1] == 1:
        return images
    return (images * images.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
