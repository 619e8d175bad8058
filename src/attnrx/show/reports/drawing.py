"""Pictures of samples: maps as embedded pixels, and the patches of an image as SVG."""

import base64
import io
from collections.abc import Mapping
from html import escape
from itertools import groupby

import torch

from attnrx.support.shapes import Bool, Float, Int, Tensor, UInt8

# Cividis (Nuñez, Anderton and Renslow 2018) at nine equal steps: perceptually uniform, also for colour-blind readers.
_CIVIDIS = "00224e 1a386f 434e6c 61656f 7d7c78 9c9477 bcae6c decb57 fee838"


def colour(values: Float[Tensor, "height width"], low: float, high: float) -> Float[Tensor, "3 height width"]:
    """Maps values from `low` (dark blue) to `high` (yellow) to colours."""
    ramp = torch.tensor([list(bytes.fromhex(code)) for code in _CIVIDIS.split()], dtype=torch.float64) / 255
    position = ((values.double() - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(0.0) * (len(ramp) - 1)
    # The highest value is the end of the last interval, and not the beginning of one more.
    below = position.floor().long().clamp(max=len(ramp) - 2)
    mixed = torch.lerp(ramp[below], ramp[below + 1], (position - below)[..., None])
    return mixed.movedim(-1, 0).to(values.dtype)


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


def patch_picture(
    title: str,
    shown: str,
    left: Bool[Tensor, "rows columns"],
    address: str | None = None,
    groups: Int[Tensor, "rows columns"] | None = None,
    fills: Mapping[int, str] | None = None,
) -> str:
    """Draws the image with the id `shown`; its patches form a grid, and those not marked in `left` are covered.

    Patches of the same number in `groups` were merged: they are filled with the colour in `fills`, if there is one for
    this number, and outlined together. The unit of the picture is one patch. The first picture of an image contains it
    as the data URI `address`; the others refer to its id.
    """
    rows, columns = left.shape
    size = f'width="{columns}" height="{rows}"'
    image = f'<use class="shown" href="#{shown}"/>'
    if address is not None:
        image = f'<image class="shown" id="{shown}" href="{address}" {size} preserveAspectRatio="none"/>'
    shapes = [image]
    # Outlines separate patches of different parts: merged groups, or kept and pruned patches.
    parts, line = (left.long(), "outline") if groups is None else (groups, "seam")
    if groups is not None:
        for group, fill in (fills or {}).items():
            shapes.append(f'<path class="group" d="{_runs(groups == group)}" fill="{fill}"/>')
    elif not left.all():
        shapes.append(f'<path class="veil" d="{_runs(~left)}"/>')
    if outline := _outline(parts.tolist()):
        shapes.append(f'<path class="{line}" d="{outline}"/>')
    # Names of classes may contain markup.
    head = f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="{escape(title)}" {size}>'
    return f"{head}{''.join(shapes)}</svg>"


def _runs(mask: Bool[Tensor, "rows columns"]) -> str:
    """Returns the marked patches as one rectangle per run within a row."""
    # Runs instead of single patches, to keep the page small.
    path = ""
    for row, cells in enumerate(mask.tolist()):
        column = 0
        for is_marked, run in groupby(cells):
            length = len(list(run))
            path += f"M{column} {row}h{length}v1h-{length}z" if is_marked else ""
            column += length
    return path


def _outline(parts: list[list[int]]) -> str:
    """Returns the edges between neighbouring patches of different parts."""
    # The upper and the left edge of every patch, so that no edge is drawn twice.
    edges = ""
    for row, cells in enumerate(parts):
        for column, part in enumerate(cells):
            if row and parts[row - 1][column] != part:
                edges += f"M{column} {row}h1"
            if column and cells[column - 1] != part:
                edges += f"M{column} {row}v1"
    return edges
