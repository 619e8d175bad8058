"""Blur: Gaussian, out of focus, through glass, by motion and by zoom."""

import numpy as np
import torch
from torch.nn import functional

from attnrx.shapes import Float, Int, Tensor
from attnrx_lab.corruptions.filters import Draws, Images, padded, smoothed, streaked, uniform_noise, zoomed
from attnrx_lab.corruptions.severities import Levels


def gaussian_blur(images: Images, levels: Levels, draws: Draws) -> Images:
    """Smooths by a standard deviation in pixels."""
    return smoothed(images, levels[0])


def defocus_blur(images: Images, levels: Levels, draws: Draws) -> Images:
    """Averages over a disk of a radius, its edge smoothed by a standard deviation."""
    kernel = _disk(*levels).to(images)
    batch, channels, height, width = images.shape
    wide = padded(images, len(kernel) // 2, "mirror").flatten(0, 1)[:, None]
    return functional.conv2d(wide, kernel[None, None]).reshape(batch, channels, height, width)


def _disk(radius: int | float, deviation: int | float) -> Float[Tensor, "side side"]:
    reach, edge = (8, 1) if radius <= 8 else (int(radius), 2)
    line = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (line[:, None] ** 2 + line**2 <= radius**2).double()
    offsets = torch.arange(-edge, edge + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (offsets / deviation) ** 2)
    weights = weights / weights.sum()
    around = padded((disk / disk.sum())[None, None], edge, "mirror")
    return functional.conv2d(around, (weights[:, None] * weights)[None, None])[0, 0]


def glass_blur(images: Images, levels: Levels, draws: Draws) -> Images:
    """Smooths by a standard deviation, swaps pixels within a distance several times, and smooths again.

    The published code copies one pixel over the other instead of swapping them; so does this.
    """
    deviation, reach, times = levels[0], int(levels[1]), int(levels[2])
    pixels = (255 * smoothed(images, deviation).clamp(0, 1)).floor() / 255
    height, width = images.shape[-2:]
    rows, columns = (torch.arange(side - reach, reach, -1) for side in (height, width))
    shape = (times, len(rows), len(columns), 2)
    moves = uniform_noise(images, shape, draws, -reach, reach).floor().long().cpu()
    indices = (rows[:, None] * width + columns).expand(times, -1, -1)
    sources = indices[None] + moves[..., 1] * width + moves[..., 0]
    order = torch.stack([_copied(indices.flatten(), own.flatten(), height * width) for own in sources])
    moved = pixels.flatten(2).gather(2, order.to(images.device)[:, None].expand(-1, images.shape[1], -1))
    return smoothed(moved.unflatten(2, (height, width)), deviation)


def _copied(targets: Int[Tensor, "moves"], sources: Int[Tensor, "moves"], count: int) -> Int[Tensor, "pixels"]:
    """Copies pixels one after the other, each from its current source, and returns the source of each."""
    order = list(range(count))
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        order[target] = order[source]
    return torch.tensor(order)


def motion_blur(images: Images, levels: Levels, draws: Draws) -> Images:
    """Smears by a radius and a standard deviation, within 45 degrees of the rows."""
    return streaked(images, int(levels[0]), levels[1], uniform_noise(images, (), draws, -45, 45))


def zoom_blur(images: Images, levels: Levels, draws: Draws) -> Images:
    """Averages the images with those enlarged by factors from 1 to an end, in steps."""
    # The factors as in NumPy's arange, which may include the end by rounding.
    factors = np.arange(1, levels[0], levels[1]).tolist()
    return (images + sum(zoomed(images, factor) for factor in factors)) / (len(factors) + 1)
