"""The nineteen corruptions, which simulate noise, blur, weather and digital processing.

Each function takes an image with the shape [channels, height, width] and values in [0, 1], a random generator, and the
parameters of a severity level.
"""

import io
import math

import numpy as np
import torch
from PIL import Image
from scipy import ndimage

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float

Pixels = Float[np.ndarray, "channels height width"]
Layer = Float[np.ndarray, "1 height width"]
Draws = np.random.Generator
Number = int | float

ICE = (0.89, 1.02, 1.09)  # the mean colour of the benchmark's ice photographs, relative to their brightness
ICE_LEVELS, ICE_DEVIATION = (0.4, 0.85), 0.12  # the range of their brightness, and its deviation within a photograph
# For `spatter`. The colours, the relief kernel and the largest distance come from the published code.
WATER = (175 / 255, 238 / 255, 238 / 255)
MUD = (63 / 255, 42 / 255, 20 / 255)
RELIEF = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])  # light from one corner
FARTHEST = 20  # the distance in pixels from the edge of a drop beyond which the drop is flat
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in OpenCV


def gaussian_noise(image: Pixels, draws: Draws, deviation: Number) -> Pixels:
    return image + draws.normal(0, deviation, image.shape)


def shot_noise(image: Pixels, draws: Draws, photons: Number) -> Pixels:
    """Simulates photon counts. A pixel with the value 1 receives `photons` photons on average."""
    return draws.poisson(photons * image) / photons


def impulse_noise(image: Pixels, draws: Draws, share: Number) -> Pixels:
    """Sets a random share of the values to 0 or 1, with equal probability."""
    return np.where(draws.random(image.shape) < share, draws.integers(0, 2, image.shape), image)


def speckle_noise(image: Pixels, draws: Draws, deviation: Number) -> Pixels:
    return image + image * draws.normal(0, deviation, image.shape)


def gaussian_blur(image: Pixels, draws: Draws, deviation: Number) -> Pixels:
    return ndimage.gaussian_filter(image, (0, deviation, deviation), mode="nearest")


def defocus_blur(image: Pixels, draws: Draws, radius: Number, deviation: Number) -> Pixels:
    """Blurs with a disk of this radius. A Gaussian with the standard deviation `deviation` smooths the disk's edge."""
    # The published kernels are a disk of 17 x 17 pixels and a Gaussian of 3 x 3, both larger for larger radii.
    reach, edge = (8, 1) if radius <= 8 else (int(radius), 2)
    line = np.arange(-reach, reach + 1)
    disk = (line[:, None] ** 2 + line**2 <= radius**2).astype(float)
    kernel = ndimage.gaussian_filter(disk / disk.sum(), deviation, radius=edge, mode="mirror")
    # OpenCV's filters use this border by default. NumPy calls it "reflect", and SciPy calls it "mirror".
    wide = torch.from_numpy(np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode="reflect"))
    # ndimage.convolve would take seconds for a kernel of this size.
    return torch.nn.functional.conv2d(wide[:, None], torch.from_numpy(kernel)[None, None])[:, 0].numpy()


def glass_blur(image: Pixels, draws: Draws, deviation: Number, reach: Number, times: Number) -> Pixels:
    """Smooths with a Gaussian, moves every pixel by at most `reach` in each of `times` rounds, and smooths again.

    The published code is meant to swap pixels, but it copies one pixel over the other. This function also copies, to
    match the published code.
    """
    image = np.floor(255 * gaussian_blur(image, draws, deviation)) / 255  # to bytes, as published
    (height, width), reach = image.shape[1:], int(reach)
    # Pixels are copied one after the other, from the last to the first. So a copied value may be copied again.
    targets = np.arange(height - reach, reach, -1)[:, None] * width + np.arange(width - reach, reach, -1)
    order = list(range(height * width))  # the source pixel of each position
    for _ in range(int(times)):
        down, right = draws.integers(-reach, reach, (2, *targets.shape))
        sources = targets + down * width + right
        for target, source in zip(targets.ravel().tolist(), sources.ravel().tolist(), strict=True):
            order[target] = order[source]
    return gaussian_blur(image.reshape(len(image), -1)[:, order].reshape(image.shape), draws, deviation)


def motion_blur(image: Pixels, draws: Draws, radius: int, deviation: Number) -> Pixels:
    """Blurs the image along a random direction within 45 degrees of the horizontal."""
    return streaked(image, radius, deviation, draws.uniform(-45, 45))


def streaked(image: Pixels, radius: int, deviation: Number, degrees: Number) -> Pixels:
    """Blurs an image along one direction with a one-sided Gaussian of 2 * radius + 1 pixels, as ImageMagick does."""
    margin, (height, width) = 2 * radius, image.shape[1:]
    weights = np.exp(-0.5 * (np.arange(margin + 1) / deviation) ** 2)
    wide = np.pad(image, ((0, 0), (margin, margin), (margin, margin)), mode="edge")
    smeared = np.zeros_like(image)
    for step, weight in enumerate(weights / weights.sum()):
        # ImageMagick rounds a step to a pixel as ceil(x - 0.5).
        down = margin + math.ceil(step * math.sin(math.radians(degrees)) - 0.5)
        right = margin + math.ceil(step * math.cos(math.radians(degrees)) - 0.5)
        smeared += weight * wide[:, down : down + height, right : right + width]
    return smeared


def zoom_blur(image: Pixels, draws: Draws, end: Number, step: Number) -> Pixels:
    """Averages the image with copies that are enlarged by factors from 1 to `end` in steps of `step`."""
    factors = np.arange(1, end, step)  # as published, may include `end` because of rounding
    return (image + sum(_zoomed(image, factor) for factor in factors)) / (len(factors) + 1)


def _zoomed(image: Pixels, factor: Number) -> Pixels:
    """Crops the centre of an image, and enlarges it by `factor` to the full image size with linear interpolation."""
    crops = [math.ceil(side / factor) for side in image.shape[1:]]
    top, left = ((side - crop) // 2 for side, crop in zip(image.shape[1:], crops, strict=True))
    middle = image[:, top : top + crops[0], left : left + crops[1]]
    large = np.asarray(ndimage.zoom(middle, (1, factor, factor), order=1))
    # The enlarged crop has a few pixels too many, because its sides were rounded up.
    top, left = ((have - side) // 2 for have, side in zip(large.shape[1:], image.shape[1:], strict=True))
    return large[:, top : top + image.shape[1], left : left + image.shape[2]]


def snow(image: Pixels, draws: Draws, *levels: Number) -> Pixels:
    """Whitens the image and adds snowflakes, which are enlarged, thresholded and motion-blurred noise.

    `levels` contains seven numbers. The first four are the mean and the standard deviation of the noise, its
    enlargement factor, and the threshold. Then follow the radius and the standard deviation of the motion blur, and the
    weight of the unwhitened image.
    """
    mean, deviation, factor, threshold, radius, length, share = levels
    flakes = _zoomed(draws.normal(mean, deviation, (1, *image.shape[1:])), factor)
    flakes = np.floor(255 * np.where(flakes < threshold, 0, flakes).clip(0, 1)) / 255  # to bytes, as published
    flakes = streaked(flakes, int(radius), length, draws.uniform(-135, -45))
    white = share * image + (1 - share) * np.maximum(image, 1.5 * _grey(image) + 0.5)
    return white + flakes + flakes[:, ::-1, ::-1]  # adds the flakes, and the same flakes rotated by 180 degrees


def frost(image: Pixels, draws: Draws, kept: Number, share: Number) -> Pixels:
    """Multiplies the image by `kept`, and adds an ice texture multiplied by `share`.

    The benchmark adds crops of photographs of ice, which are not included here. This function instead draws ice from
    the ridges of a fractal landscape. Its brightness, variety and roughness match the photographs. You can compare
    models with each other on these images, but you cannot compare their results with published results.
    """
    ridges = 1 - np.abs(2 * landscape(image, 1.5, draws) - 1)
    rough = (ridges - ridges.mean()) / max(ridges.std(), 1e-6)
    ice = draws.uniform(*ICE_LEVELS) + ICE_DEVIATION * rough
    return kept * image + share * (ice * _colour(ICE, image)).clip(0, 1)


def fog(image: Pixels, draws: Draws, share: Number, decay: Number) -> Pixels:
    """Adds a fractal landscape multiplied by `share`, and rescales the image to its original maximum."""
    return (image + share * landscape(image, decay, draws)) * image.max() / (image.max() + share)


def landscape(image: Pixels, decay: Number, draws: Draws) -> Layer:
    """Draws a fractal height map [1, height, width] with values in [0, 1], by the diamond-square algorithm on a torus.

    From one scale to the next, the amplitude of the random heights is divided by the square of `decay`.
    """
    side = 1 << (max(image.shape[1:]) - 1).bit_length()  # the next power of two, which every stride divides
    heights = np.zeros((side, side))
    stride, amplitude = side, 1.0
    while stride >= 2:
        half, count = stride // 2, side // stride
        drawn = amplitude * draws.uniform(-1, 1, (3, count, count))
        corners = heights[::stride, ::stride]
        below = np.roll(corners, -1, 0)
        centres = (corners + below + np.roll(corners + below, -1, 1)) / 4 + drawn[0]
        # Each point is the mean of four neighbours, at the corners of a square or a diamond. A torus has no border.
        beside = (corners + np.roll(corners, -1, 1) + centres + np.roll(centres, 1, 0)) / 4 + drawn[1]
        under = (corners + below + centres + np.roll(centres, 1, 1)) / 4 + drawn[2]
        heights[half::stride, half::stride] = centres
        heights[::stride, half::stride] = beside
        heights[half::stride, ::stride] = under
        # The published code draws within +-a and multiplies by a again, so our decay is squared. The published a starts
        # at 100. Ours starts at 1, which is equivalent because of the rescaling below.
        stride, amplitude = half, amplitude / decay**2
    flat = (heights - heights.min()) / np.ptp(heights)
    return flat[None, : image.shape[1], : image.shape[2]]


def spatter(image: Pixels, draws: Draws, *levels: Number) -> Pixels:
    """Adds drops of water or mud where smoothed noise is above a threshold.

    `levels` contains six numbers: the mean and the standard deviation of the noise, the standard deviation of the
    Gaussian that smooths it, the threshold, a strength, and 0 for water or 1 for mud. The strength is the intensity of
    the water, or the standard deviation of the Gaussian that smooths the mud. The benchmark detects the edges of drops
    with Canny's method. This function places the edges where the noise crosses the threshold.
    """
    mean, deviation, size, threshold, much, kind = levels
    liquid = gaussian_blur(draws.normal(mean, deviation, (1, *image.shape[1:])), draws, size)
    if kind:
        mud = gaussian_blur((liquid > threshold).astype(float), draws, much)
        mud = np.where(mud < 0.8, 0, mud)  # as published, thin mud is transparent
        return (1 - mud) * image + mud * _colour(MUD, image)
    liquid = np.where(liquid < threshold, 0, liquid).clip(0, 1)
    water = liquid * _relief(liquid[0] > 0)
    return image + much * water / max(water.max(), 1e-9) * _colour(WATER, image)


def _relief(drops: np.ndarray) -> Layer:
    """Shades drops, [height, width], lit from one corner. A pixel's height is its equalized distance to the edge."""
    inside = np.asarray(ndimage.binary_erosion(drops, border_value=1))
    distance = np.asarray(ndimage.distance_transform_edt(inside | np.logical_not(drops))).clip(max=FARTHEST)
    # Histogram equalization as in OpenCV, where the darkest level becomes 0.
    levels = ndimage.uniform_filter(distance, 3, mode="mirror").astype(np.uint8)
    below = np.bincount(levels.ravel()).cumsum()
    first = below[levels.min()]
    even = (255 * (below - first) / max(levels.size - first, 1)).round()[levels]
    lit = ndimage.correlate(even, RELIEF, mode="mirror").clip(0, 255)
    return ndimage.uniform_filter(lit, 3, mode="mirror")[None]


def brightness(image: Pixels, draws: Draws, more: Number) -> Pixels:
    """Adds `more` to the HSV value of every pixel, which is its largest channel. Hue and saturation do not change."""
    value = image.max(0)
    brighter = np.minimum(value + more, 1)
    return np.where(value > 0, image * brighter / np.maximum(value, 1e-9), brighter)  # black has no hue: it turns grey


def contrast(image: Pixels, draws: Draws, factor: Number) -> Pixels:
    """Multiplies the difference between every pixel and the mean of its channel by `factor`."""
    mean = image.mean((1, 2), keepdims=True)
    return mean + factor * (image - mean)


def saturate(image: Pixels, draws: Draws, factor: Number, more: Number) -> Pixels:
    """Multiplies every pixel's saturation by `factor` and adds `more`. Grey pixels are treated as red.

    Raises:
        InvalidInput: The image has no colour.
    """
    if len(image) != 3:
        raise InvalidInput(
            f"saturate: images with {len(image)} channel(s) have no colour to change; leave this corruption out."
        )
    value = image.max(0)
    saturation = (value - image.min(0)) / np.maximum(value, 1e-9)
    # A channel is value * (1 - saturation * s), with s = 0 for the largest channel and 1 for the smallest. So scaling
    # the saturation scales the distance of each channel from the value.
    new_saturation = (saturation * factor + more).clip(0, 1)
    red = np.stack([value, value * (1 - new_saturation), value * (1 - new_saturation)])
    return np.where(saturation > 0, value - (value - image) * new_saturation / np.maximum(saturation, 1e-9), red)


def elastic_transform(image: Pixels, draws: Draws, factor: Number, deviation: Number, distance: Number) -> Pixels:
    """Applies a random affine transform to the image, then displaces each pixel by a smooth random field.

    `factor` scales the random field. `deviation` is the standard deviation of the Gaussian that smooths this field. The
    affine transform shifts three points, each by at most `distance` along either axis.
    """
    height, width = image.shape[1:]
    reach = min(height, width) // 3
    points = np.array([height // 2, width // 2]) + reach * np.array([[1, 1], [-1, 1], [-1, -1]])
    moved = points + draws.uniform(-distance, distance, (3, 2))
    # The affine map from the moved points back to the points says where each pixel of the result comes from.
    back = np.linalg.solve(np.c_[moved, np.ones(3)], points)
    rows = np.indices((height, width))
    # Borders are as published. OpenCV's BORDER_REFLECT_101 is SciPy's "mirror". The second step uses SciPy's "reflect".
    image = sampled(image, np.tensordot(back[:2].T, rows, 1) + back[2][:, None, None], "mirror")
    moves = draws.uniform(-1, 1, rows.shape)
    moves = factor * ndimage.gaussian_filter(moves, (0, deviation, deviation), mode="reflect", truncate=3)
    return sampled(image, rows + moves, "reflect")


def sampled(image: Pixels, places: Float[np.ndarray, "2 height width"], border: str) -> Pixels:
    """Samples an image at fractional positions by linear interpolation. `border` is SciPy's mode for mirroring."""
    return np.stack([ndimage.map_coordinates(plane, places, order=1, mode=border) for plane in image])


def pixelate(image: Pixels, draws: Draws, share: Number) -> Pixels:
    """Shrinks each side of the image to `share` of its length, and enlarges it again. Both steps use box filters."""
    picture = _picture(image)
    small = [max(1, int(side * share)) for side in picture.size]
    boxes = picture.resize((small[0], small[1]), Image.Resampling.BOX).resize(picture.size, Image.Resampling.BOX)
    return _pixels(boxes)


def jpeg_compression(image: Pixels, draws: Draws, quality: int) -> Pixels:
    file = io.BytesIO()
    _picture(image).save(file, format="JPEG", quality=quality)
    return _pixels(Image.open(file))


def _picture(image: Pixels) -> Image.Image:
    values = (255 * image).round().astype(np.uint8)
    return Image.fromarray(values[0] if len(values) == 1 else values.transpose(1, 2, 0))


def _pixels(picture: Image.Image) -> Pixels:
    values = np.asarray(picture, dtype=float) / 255
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


def _colour(colour: tuple[float, float, float], image: Pixels) -> Float[np.ndarray, "channels 1 1"]:
    """Returns the colour if the image has three channels, and otherwise the colour's grey level."""
    own = np.array(colour)[:, None, None]
    return own if len(image) == 3 else _grey(own)


def _grey(image: Pixels) -> Layer:
    return image if len(image) == 1 else np.tensordot(LUMA, image, 1)[None]
