"""Images and attention maps as PNG data URIs."""

import base64
import io

import torch

from attnrx.shapes import Float, Tensor, UInt8

GAP_WIDTH = 1  # pixels between the maps of a mosaic

# Cividis (Nuñez, Anderton and Renslow 2018) at nine equal steps: perceptually uniform, also for colour-blind readers.
_CIVIDIS = (
    (0, 34, 78),
    (26, 56, 111),
    (67, 78, 108),
    (97, 101, 111),
    (125, 124, 120),
    (156, 148, 119),
    (188, 174, 108),
    (222, 203, 87),
    (254, 232, 56),
)


def colour(values: Float[Tensor, "height width"], low: float, high: float) -> Float[Tensor, "3 height width"]:
    """Maps values from `low` (dark blue) to `high` (yellow) to colours; NaN becomes the grey of the gaps."""
    ramp = torch.tensor(_CIVIDIS, dtype=torch.float64) / 255
    position = ((values.double() - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(0.0) * (len(ramp) - 1)
    below = position.floor().long().clamp(max=len(ramp) - 2)
    mixed = torch.lerp(ramp[below], ramp[below + 1], (position - below)[..., None])
    mixed[values.isnan()] = 0.5
    return mixed.movedim(-1, 0).to(values.dtype)


def mosaic(maps: Float[Tensor, "layers heads height width"]) -> Float[Tensor, "rows columns"]:
    """Arranges the maps as layers by heads, with NaN gaps between them."""
    layers, heads, height, width = maps.shape
    sheet = maps.new_full((layers, heads, height + GAP_WIDTH, width + GAP_WIDTH), torch.nan)
    sheet[..., :height, :width] = maps
    flat = sheet.permute(0, 2, 1, 3).reshape(layers * (height + GAP_WIDTH), heads * (width + GAP_WIDTH))
    return flat[:-GAP_WIDTH, :-GAP_WIDTH]


def overlay(
    image: Float[Tensor, "channels height width"], map: Float[Tensor, "rows columns"], low: float, high: float
) -> Float[Tensor, "3 height width"]:
    """Blends a map, upsampled bilinearly, with the grey image."""
    stretched = torch.nn.functional.interpolate(
        map[None, None], size=image.shape[-2:], mode="bilinear", align_corners=False
    )
    grey = image.mean(0, keepdim=True).expand(3, -1, -1).to(map.dtype)
    return 0.35 * grey + 0.65 * colour(stretched[0, 0], low, high)


def as_uri(image: Float[Tensor, "channels height width"]) -> str:
    """Returns an image in the unit range (grey, RGB or RGBA) as a PNG data URI."""
    from PIL import Image

    pixels: UInt8[Tensor, "channels height width"] = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    rgb = pixels.expand(3, -1, -1) if pixels.shape[0] == 1 else pixels
    buffer = io.BytesIO()
    Image.fromarray(rgb.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def colour_ramp() -> str:
    """Returns the colour scale from low to high as a picture one pixel high."""
    return as_uri(colour(torch.linspace(0, 1, 128)[None], 0.0, 1.0))
