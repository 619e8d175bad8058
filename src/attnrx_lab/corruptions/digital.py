"""Digital: brightness, contrast, saturation, elastic transforms, large pixels and JPEG."""

import io
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn import functional

from attnrx.data.pixels import decode, threads
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor
from attnrx_lab.corruptions.filters import Draws, Images, box, smoothed, uniform_noise
from attnrx_lab.corruptions.severities import Levels


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
