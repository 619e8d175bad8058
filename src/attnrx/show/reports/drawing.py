"""SVG drawing: axes, marks, escaped text and embedded pixels."""

import base64
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

import torch

from attnrx.show.reports.numbers import NOTHING, Number, fixed, short
from attnrx.support.shapes import Float, Tensor, UInt8


class Drawing:
    """An SVG picture under construction; colours come from the classes of the page's style sheet."""

    def __init__(self, width: Number, height: Number, title: str, description: str = ""):
        box = f"0 0 {_coordinate(width)} {_coordinate(height)}"
        size = {"width": _coordinate(width), "height": _coordinate(height)}
        # ElementTree escapes texts and attributes: names of models and classes may contain markup. The label and the
        # description are for screen readers.
        self._root = ElementTree.Element("svg", {"viewBox": box, "role": "img", "aria-label": title, **size})
        if description:
            ElementTree.SubElement(self._root, "desc").text = description

    def add(self, shape: str, style: str, tip: str = "", **attributes: Number | str) -> None:
        """Adds one shape; `style` are its CSS classes and `tip` is its tooltip."""
        # Names of attributes have hyphens, which keyword arguments cannot have.
        written = {name.replace("_", "-"): _coordinate(value) for name, value in attributes.items()}
        element = ElementTree.SubElement(self._root, shape, {"class": style, **written})
        if tip:
            ElementTree.SubElement(element, "title").text = tip

    def text(self, x: Number, y: Number, words: str, style: str = "label", anchor: str = "start") -> None:
        """Adds text whose baseline starts, ends or is centred at a point."""
        attributes = {"x": _coordinate(x), "y": _coordinate(y), "text-anchor": anchor, "class": style}
        ElementTree.SubElement(self._root, "text", attributes).text = words

    def svg(self) -> str:
        """Returns the finished picture as markup for an HTML page."""
        # As text, without the XML declaration, which is not allowed inside HTML.
        return ElementTree.tostring(self._root, encoding="unicode")


def _coordinate(value: Number | str) -> str:
    # Two decimals are a hundredth of a pixel; more only increase the page size.
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class AxisScale:
    """Maps `low`..`high` to `start`..`stop` linearly; `high` must exceed `low`."""

    low: Number
    high: Number
    start: Number
    stop: Number

    def __call__(self, value: Number) -> Number:
        return self.start + (self.stop - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 4) -> list[Number]:
        """Returns about `count` round values within the range."""
        rough = (self.high - self.low) / max(count, 1)
        power = 10.0 ** math.floor(math.log10(rough))
        # Tolerances, because ranges such as 0.1 to 0.7 are not exact in binary.
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    @property
    def power(self) -> int:
        """The power of ten that the labels are in units of: 0 unless they would be too long."""
        largest = max(abs(self.low), abs(self.high))
        if 1e-3 <= largest < 1e5 or largest == 0:
            return 0
        return math.floor(math.log10(largest))

    def labels(self, count: int = 4) -> list[tuple[Number, str]]:
        """Returns the ticks with their labels, in units of `power`; all have the same decimals."""
        ticks = self.ticks(count)
        if self.power or len(ticks) < 2:
            unit = 10.0**self.power
            return [(tick, short(tick / unit, 3)) for tick in ticks]
        step = ticks[1] - ticks[0]
        decimals = next((digits for digits in range(6) if abs(round(step, digits) - step) < step * 1e-6), 6)
        return [(tick, fixed(tick, decimals)) for tick in ticks]


def span(values: Iterable[Number], *, include: Iterable[Number] = (), room: Number = 0.06) -> tuple[Number, Number]:
    """Returns a range that contains all values with a margin of `room`; equal values get a range around them."""
    everything = [value for value in (*values, *include) if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(everything), max(everything)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):  # equal up to rounding
        margin = abs(low) * 0.1 if abs(low) > NOTHING else 1.0
        return low - margin, high + margin
    margin = (high - low) * room
    return low - margin, high + margin


GAP_WIDTH = 1  # pixels between the maps of a mosaic

# Cividis (Nuñez, Anderton and Renslow 2018) at nine equal steps: perceptually uniform, also for colour-blind readers.
_CIVIDIS = "00224e 1a386f 434e6c 61656f 7d7c78 9c9477 bcae6c decb57 fee838"


def colour(values: Float[Tensor, "height width"], low: float, high: float) -> Float[Tensor, "3 height width"]:
    """Maps values from `low` (dark blue) to `high` (yellow) to colours; NaN becomes the grey of the gaps."""
    ramp = torch.tensor([list(bytes.fromhex(code)) for code in _CIVIDIS.split()], dtype=torch.float64) / 255
    position = ((values.double() - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(0.0) * (len(ramp) - 1)
    # The highest value is the end of the last interval, and not the beginning of one more.
    below = position.floor().long().clamp(max=len(ramp) - 2)
    mixed = torch.lerp(ramp[below], ramp[below + 1], (position - below)[..., None])
    mixed[values.isnan()] = 0.5
    return mixed.movedim(-1, 0).to(values.dtype)


def mosaic(maps: Float[Tensor, "layers heads height width"]) -> Float[Tensor, "rows columns"]:
    """Arranges the maps as layers by heads, with NaN gaps between them."""
    layers, heads, height, width = maps.shape
    sheet = maps.new_full((layers, heads, height + GAP_WIDTH, width + GAP_WIDTH), torch.nan)
    sheet[..., :height, :width] = maps
    # [layers, height, heads, width]: layers are rows of maps, heads their columns.
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
    # Pillow takes one channel only as an image without a channel axis.
    pixels = pixels.expand(3, -1, -1) if pixels.shape[0] == 1 else pixels
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def colour_ramp() -> str:
    """Returns the colour scale from low to high as a picture one pixel high."""
    return as_uri(colour(torch.linspace(0, 1, 128)[None], 0.0, 1.0))
