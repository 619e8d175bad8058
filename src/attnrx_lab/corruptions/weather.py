"""Weather: snow, frost, fog and spatter."""

import torch
from torch.nn import functional

from attnrx.shapes import Float, Tensor
from attnrx_lab.corruptions.filters import (
    Draws,
    Images,
    Layer,
    grey,
    landscapes,
    normal,
    padded,
    smoothed,
    streaked,
    uniform_noise,
    zoomed,
)
from attnrx_lab.corruptions.severities import Levels

ICE = (0.89, 1.02, 1.09)  # the colour of the benchmark's photographs, around one
ICE_LEVELS, ICE_DEVIATION = (0.4, 0.85), 0.12  # their brightness, and its variation within one
WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
RELIEF = ((-2.0, -1.0, 0.0), (-1.0, 1.0, 1.0), (0.0, 1.0, 2.0))  # light from one corner
FARTHEST = 20  # pixels from the edge of a drop, beyond which it is flat


def snow(images: Images, levels: Levels, draws: Draws) -> Images:
    """Whitens, and adds flakes: noise (mean, deviation), enlarged, above a threshold, smeared (radius, deviation)."""
    mean, deviation, factor, threshold, radius, length, share = levels
    flakes = zoomed(mean + deviation * normal(images, (1, *images.shape[2:]), draws), factor)
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = (255 * flakes).floor() / 255
    flakes = streaked(flakes, int(radius), length, uniform_noise(images, (), draws, -135, -45))
    white = share * images + (1 - share) * torch.maximum(images, 1.5 * grey(images) + 0.5)
    return white + flakes + flakes.flip(-2, -1)


def frost(images: Images, levels: Levels, draws: Draws) -> Images:
    """Darkens by a factor, and adds a share of ice.

    The benchmark adds crops of six photographs, which are not included. This ice is generated: the ridges of a fractal
    landscape with the brightness, variety and roughness of the photographs. Its numbers are comparable between models,
    not with those of the benchmark.
    """
    ridges = 1 - (2 * landscapes(images, 1.5, draws) - 1).abs()
    rough = (ridges - ridges.mean((2, 3), keepdim=True)) / ridges.std((2, 3), keepdim=True).clamp(min=1e-6)
    ice = uniform_noise(images, (1, 1, 1), draws, *ICE_LEVELS) + ICE_DEVIATION * rough
    return levels[0] * images + levels[1] * (ice * _colour(ICE, images)).clamp(0, 1)


def fog(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds a share of a fractal landscape (and its decay), and rescales to the former maximum."""
    most = images.amax((1, 2, 3), keepdim=True)
    return (images + levels[0] * landscapes(images, levels[1], draws)) * most / (most + levels[0])


def spatter(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds drops of water or mud: noise (mean, deviation), smoothed, where it is above a threshold.

    The last levels are the amount of it, and 0 for water. The benchmark finds the edges of drops with Canny's detector
    and measures distances to a fifth of a pixel; here edges are where the threshold is crossed, and distances are those
    of an octagon.
    """
    mean, deviation, size, threshold, much, kind = levels
    liquid = smoothed(mean + deviation * normal(images, (1, *images.shape[2:]), draws), size)
    if kind:
        mud = smoothed((liquid > threshold).to(images.dtype), much)
        mud = torch.where(mud < 0.8, 0, mud)
        return (1 - mud) * images + mud * _colour(MUD, images)
    liquid = torch.where(liquid < threshold, 0, liquid).clamp(0, 1)
    water = liquid * _relief(liquid > 0).to(images.dtype)
    most = water.amax((1, 2, 3), keepdim=True)
    return images + much * water / most.clamp(min=1e-9) * _colour(WATER, images)


def _colour(colour: tuple[float, float, float], images: Images) -> Float[Tensor, "1 channels 1 1"]:
    """Returns a colour for images with three channels, else its brightness."""
    own = images.new_tensor(colour)[None, :, None, None]
    return own if images.shape[1] == 3 else grey(own)


def _relief(drops: Tensor) -> Layer:
    """Lights drops from one side: their distance to the edge, equalized to 0..255, as a height map."""
    reached = (drops & (_grown((~drops).double(), False) > 0)).double()  # the edge, and what is near it
    distance = torch.zeros_like(reached)
    for step in range(FARTHEST):
        distance += 1 - reached
        reached = _grown(reached, step % 2 == 1)
    levels = functional.avg_pool2d(padded(distance, 1, "mirror"), 3, 1).floor().clamp(0, 255)
    even = torch.stack([_equalized(own) for own in levels])
    kernel = even.new_tensor(RELIEF)[None, None]
    lit = functional.conv2d(padded(even, 1, "mirror"), kernel).clamp(0, 255)
    return functional.avg_pool2d(padded(lit, 1, "mirror"), 3, 1)


def _grown(layer: Layer, corners: bool) -> Layer:
    """Returns the largest of every pixel and its neighbours: four of them, or eight with the corners."""
    if corners:
        return functional.max_pool2d(layer, 3, 1, 1)
    return torch.maximum(
        functional.max_pool2d(layer, (3, 1), 1, (1, 0)), functional.max_pool2d(layer, (1, 3), 1, (0, 1))
    )


def _equalized(levels: Float[Tensor, "1 height width"]) -> Float[Tensor, "1 height width"]:
    """Spreads whole levels over 0 to 255 such that each share of the range holds its share of the pixels."""
    counts = levels.long().flatten().bincount(minlength=256)
    below = counts.cumsum(0)
    first = below[counts > 0][0]
    rest = (below[-1] - first).clamp(min=1)
    return (255 * (below - first) / rest).round().clamp(0, 255).to(levels.dtype)[levels.long()]
