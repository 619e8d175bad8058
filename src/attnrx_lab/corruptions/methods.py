"""The nineteen corruptions: noise, blur, weather and digital; all take images in [0, 1], their levels and the draws."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch.nn import functional

from attnrx.data.pixels import decode, threads
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Int, Tensor
from attnrx_lab.corruptions.filters import (
    Draws,
    Images,
    Layer,
    box,
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


def gaussian_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds noise of a standard deviation."""
    return images + levels[0] * normal(images, tuple(images.shape[1:]), draws)


def shot_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Counts photons: a pixel of 1 is this many on average."""
    device = images.device if draws is None else draws.device
    counts = [torch.poisson(levels[0] * image.to(device).clamp(min=0), generator=draws) for image in images]
    return torch.stack(counts).to(images.device) / levels[0]


def impulse_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Sets a share of the values to 0 or to 1, by the flip of a coin."""
    hit, coin = uniform_noise(images, (2, *images.shape[1:]), draws).unbind(1)
    return torch.where(hit <= levels[0], (coin <= 0.5).to(images.dtype), images)


def speckle_noise(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds noise of a standard deviation, times the pixel."""
    return images + levels[0] * images * normal(images, tuple(images.shape[1:]), draws)


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


def brightness(images: Images, levels: Levels, draws: Draws) -> Images:
    """Adds to the value of a pixel, its largest channel, and keeps hue and saturation."""
    value = images.amax(1, keepdim=True)
    brighter = (value + levels[0]).clamp(max=1)
    return torch.where(value > 0, images * brighter / value.clamp(min=1e-9), brighter)


def contrast(images: Images, levels: Levels, draws: Draws) -> Images:
    """Scales the deviation of every pixel from the mean of its image and channel."""
    mean = images.mean(dim=(-2, -1), keepdim=True)
    return mean + levels[0] * (images - mean)


def saturate(images: Images, levels: Levels, draws: Draws) -> Images:
    """Multiplies the saturation of a pixel and adds to it, keeping hue and value; grey pixels have the hue of red."""
    if images.shape[1] != 3:
        raise InvalidInput(
            f"saturate: images with {images.shape[1]} channel(s) have no colour to change; leave this corruption out."
        )
    value, least = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    saturation = (value - least) / value.clamp(min=1e-9)
    wanted = (saturation * levels[0] + levels[1]).clamp(0, 1)
    red = torch.cat([value, value * (1 - wanted), value * (1 - wanted)], dim=1)
    return torch.where(saturation > 0, value - (value - images) * wanted / saturation.clamp(min=1e-9), red)


def elastic_transform(images: Images, levels: Levels, draws: Draws) -> Images:
    """Applies a random affine map to every image, then moves each pixel by a smooth random field.

    The levels are the factor of the pixels' moves, the standard deviation of the smoothing, and the largest affine
    shift.
    """
    factor, deviation, distance = levels
    height, width = images.shape[-2:]
    centre, reach = images.new_tensor([height // 2, width // 2]), min(height, width) // 3
    points = centre + reach * images.new_tensor([[1, 1], [1, -1], [-1, -1]])
    moved = points + uniform_noise(images, (3, 2), draws, -distance, distance)
    coordinates = _plane(height, width).to(images)
    # Where a pixel of the result comes from: the plane that takes the moved points back.
    back = torch.linalg.solve(_homogeneous(moved), _homogeneous(points).expand(len(images), 3, 3))[..., :2]
    images = _sampled(images, _homogeneous(coordinates.flatten(0, 1)) @ back, corners=True)
    moves = uniform_noise(images, (2, height, width), draws, -1, 1)
    moves = factor * smoothed(moves, deviation, border="reflect", truncate=3)
    return _sampled(images, (coordinates + moves.movedim(1, -1)).flatten(1, 2), corners=False)


def _plane(height: int, width: int) -> Float[Tensor, "height width 2"]:
    """Returns the coordinates of the pixels: along the row, along the column."""
    down, right = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([right, down], -1).double()


def _homogeneous(points: Float[Tensor, "*any 2"]) -> Float[Tensor, "*any 3"]:
    return torch.cat([points, torch.ones_like(points[..., :1])], -1)


def _sampled(images: Images, coordinates: Float[Tensor, "batch pixels 2"], corners: bool) -> Images:
    """Samples images between the pixels; beyond the border they are mirrored, in the last pixel or after it."""
    height, width = images.shape[-2:]
    sides = images.new_tensor([width, height])
    scaled = 2 * coordinates / (sides - 1).clamp(min=1) - 1 if corners else (2 * coordinates + 1) / sides - 1
    grid = scaled.unflatten(1, (height, width))
    return functional.grid_sample(images, grid, "bilinear", "reflection", align_corners=corners)


def pixelate(images: Images, levels: Levels, draws: Draws) -> Images:
    """Shrinks the images to a share of their side and enlarges them again, both by boxes."""
    for axis in (-2, -1):
        side = images.shape[axis]
        small = max(1, int(side * levels[0]))
        matrix = (box(small, side) @ box(side, small)).to(images)
        images = (images.movedim(axis, -1) @ matrix.T).movedim(-1, axis)
    return images


def jpeg_compression(images: Images, levels: Levels, draws: Draws) -> Images:
    """Encodes and decodes every image as JPEG of a quality, several at once."""
    pixels = (images.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    with ThreadPoolExecutor(threads()) as pool:
        corrupted = list(pool.map(lambda image: _through_jpeg(image, int(levels[0])), pixels))
    return torch.stack(corrupted).to(images.device, images.dtype) / 255


def _through_jpeg(image: Tensor, quality: int) -> Tensor:
    from PIL import Image

    file = io.BytesIO()
    plane = image[0] if image.shape[0] == 1 else image.permute(1, 2, 0)
    Image.fromarray(plane.numpy()).save(file, format="JPEG", quality=quality)
    return decode(file.getvalue(), image.shape[0])
