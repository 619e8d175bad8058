"""Sample images: the patches kept after each stage, as SVG, and the maps that models return, as embedded pixels."""

import base64
import io
from collections.abc import Mapping
from html import escape
from itertools import groupby
from typing import Any

import torch

from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.numbers import number
from attnrx.show.reports.sampling import MapSamples, TokenSamples
from attnrx.support.shapes import Bool, Float, Int, Tensor, UInt8

# Cividis (Nuñez, Anderton and Renslow 2018) at nine equal steps: perceptually uniform, also for colour-blind readers.
_CIVIDIS = "00224e 1a386f 434e6c 61656f 7d7c78 9c9477 bcae6c decb57 fee838"


def _label(samples: MapSamples | TokenSamples, index: int) -> str:
    return samples.labels[index] if samples.labels else f"image {index}"


def outputs(content: ReportContent) -> Section | None:
    """Returns, per image, the map that every model returns, all on the scale of the original's."""
    samples = content.outputs
    if samples is None:
        return None
    first = next(iter(samples.maps.values()))
    images = []
    for index, picture in enumerate(samples.images):
        low, high = float(first[index].min()), float(first[index].max())
        maps = [
            {
                "name": name,
                "picture": as_uri(colour(values[index], low, high)),
                "error": "" if values is first else number(float((values[index] - first[index]).abs().mean()), 3),
            }
            for name, values in samples.maps.items()
        ]
        images.append({"label": _label(samples, index), "picture": as_uri(picture), "maps": maps})
    return Section("outputs", "Outputs", {"images": images, "ramp": colour_ramp()})


def tokens(content: ReportContent) -> Section | None:
    """Returns the policy as a table, and per image a picture per stage."""
    samples = content.tokens
    if samples is None:
        return None
    policy, stages = samples.policy, []
    for layer, keep, left in zip(policy.layers, policy.keep, samples.left.unbind(1), strict=True):
        counts, share = left.sum(-1), float(left.double().mean())
        stages.append((layer, keep, (int(counts.min()), int(counts.max())), share, samples.tokens[layer - 1]))
    data = {
        "reducer": str(policy.reducer),
        "stages": stages,
        "patches": samples.left.shape[2],
        "images": [_token_image(samples, index) for index in range(len(samples.images))],
        "merges": samples.groups is not None,
    }
    return Section("tokens", "Tokens", data)


def _token_image(samples: TokenSamples, index: int) -> dict[str, Any]:
    label, shown = _label(samples, index), f"tokens-{index}"
    all_patches = torch.ones(samples.grid, dtype=torch.bool)
    # The picture is stored once, with the image itself; every stage refers to it.
    unreduced = patch_picture(label, shown, all_patches, as_uri(samples.images[index].double().cpu()))
    note = f"{number(all_patches.numel())} patches"
    stages = [{"title": "image", "picture": unreduced, "note": note}]
    colours = None if samples.groups is None else _patch_colours(samples.images[index], samples.grid)
    for stage, layer in enumerate(samples.policy.layers):
        left = samples.left[index, stage].view(samples.grid)
        groups = None if samples.groups is None else samples.groups[index, stage].view(samples.grid)
        fills = None if groups is None or colours is None else _group_fills(groups, colours)
        count = f"{number(int(left.sum()))} of {number(left.numel())} patches left"
        title = f"{label} before layer {layer}: {count}"
        data = {
            "title": f"before layer {layer}",
            "picture": patch_picture(title, shown, left, groups=groups, fills=fills),
            "note": count,
        }
        stages.append(data)
    return {"label": label, "stages": stages}


def _patch_colours(image: Tensor, grid: tuple[int, int]) -> Float[Tensor, "3 patches"]:
    """Returns the mean colour of every patch."""
    means = torch.nn.functional.adaptive_avg_pool2d(image.double().cpu(), grid).flatten(1)
    return means.expand(3, -1) if len(means) == 1 else means


def _group_fills(groups: Int[Tensor, "rows columns"], colours: Float[Tensor, "3 patches"]) -> dict[int, str]:
    """Returns the mean colour of every group of at least two patches."""
    fills, group_of_patch = {}, groups.flatten()
    for group in group_of_patch.unique().tolist():
        members = group_of_patch == group
        if int(members.sum()) > 1:
            mean = (255 * colours[:, members].mean(1)).round().int().tolist()
            fills[group] = "#" + "".join(f"{channel:02x}" for channel in mean)
    return fills


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
