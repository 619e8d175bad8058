"""Sample images for reports: the patches that a token policy keeps, as SVG, and the maps that models return, as PNG."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data import ImageSet
from attnrx.data.model_data import normalization_of
from attnrx.show.reports.numbers import number
from attnrx.support.errors import InvalidInput
from attnrx.support.modules import evaluating, tensors_of
from attnrx.support.shapes import Bool, Float, ImageBatch, Int, Tensor, UInt8
from attnrx.vit.models import TokenReduction, TokenRun, answer, family_of, reduction_of, token_run
from attnrx.vit.tokens import TokenPolicy
from attnrx.vit.tokens.merging import Merging

# Cividis (Nuñez, Anderton and Renslow 2018) in nine equal steps. It is perceptually uniform, also to the colour-blind.
_CIVIDIS = "00224e 1a386f 434e6c 61656f 7d7c78 9c9477 bcae6c decb57 fee838"

VEIL, VEILED = 1.0, 0.84  # the grey that covers a pruned patch in a picture, and how much of it


@dataclass(frozen=True)
class TokenSamples:
    """Sample images with values in [0, 1], and the patches that a token policy keeps.

    `left` is true for the patches that are left after each stage of the `policy`. `tokens` is the number of tokens
    after each stage, including prefix tokens such as the class token. The patches form a `grid` (rows, columns), and
    are numbered row by row. `groups` is only set if the token reducer merges tokens. For every patch, `groups` holds
    the index of the patch whose token represents it. `labels` are the class names of the images.
    """

    images: Float[Tensor, "images channels height width"]
    left: Bool[Tensor, "images stages patches"]
    policy: TokenPolicy
    tokens: tuple[int, ...]
    grid: tuple[int, int]
    labels: tuple[str, ...] = ()
    groups: Int[Tensor, "images stages patches"] | None = None


def first_images(images: ImageSet, class_names: Sequence[str], count: int) -> tuple[ImageBatch, tuple[str, ...]]:
    """Returns at most the first `count` images, and their class names. Without class labels, no names are returned."""
    batch = next(iter(images.take(min(count, len(images))).batches(count)))
    # An image without a label has the label -1.
    if batch.labels.ndim > 1 or batch.labels.is_floating_point() or int(batch.labels.min()) < 0:
        return batch.images, ()
    # In a dataset without class names, the names are numbers.
    names = {label: f"class {name}" if name.isdigit() else name for label, name in enumerate(class_names)}
    return batch.images, tuple(names.get(label, f"class {label}") for label in map(int, batch.labels.tolist()))


def _in_unit_range(images: Tensor, model: nn.Module) -> Float[Tensor, "images channels height width"]:
    """Returns images without their normalization, clipped to [0, 1]."""
    return normalization_of(model).invert(images.cpu().float()).clamp(0, 1)


@dataclass(frozen=True)
class MapSamples:
    """Sample images with values in [0, 1], and the map that every model returns for them, e.g. a depth map.

    `maps` contains each model's maps [images, height, width], keyed by the model's name, with the original model first.
    If a model returns several numbers per position, e.g. class scores, its map is the index of the largest number.
    `labels` are the class names of the images.
    """

    images: Float[Tensor, "images channels height width"]
    maps: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()


def sample_maps(
    models: Mapping[str, nn.Module], images: Float[Tensor, "images channels height width"], labels: tuple[str, ...] = ()
) -> MapSamples | None:
    """Returns the first map among every model's outputs for a few images, or None if a model returns no map.

    Args:
        models: The models by name, with the original first.
        images: A few images, normalized for the models.
        labels: The class names of the images.
    """
    maps, original = {}, next(iter(models.values()))
    for name, model in models.items():
        weight = next(model.parameters())
        with torch.no_grad(), evaluating([model]):
            outputs = tensors_of(answer(model, images.to(weight.device, weight.dtype)))
        # A map is [images, height, width] or [images, channels, height, width]. Patch tokens are not maps.
        found = [each for each in outputs.values() if each.ndim in (3, 4) and min(each.shape[-2:]) > 1]
        if not found:
            return None
        values = found[0].float().cpu()
        if values.ndim == 4:
            values = values[:, 0] if values.shape[1] == 1 else values.argmax(1).float()
        maps[name] = values
    return MapSamples(_in_unit_range(images, original), maps, labels)


def sample_tokens(
    model: nn.Module, images: Float[Tensor, "images channels height width"], labels: tuple[str, ...] = ()
) -> TokenSamples:
    """Runs a model with token reduction on a few images, and returns the patches that every stage keeps.

    Args:
        model: A model with a token policy.
        images: A few images, normalized for the model.
        labels: The class names of the images.

    Returns:
        The samples for `ReportContent.tokens`.

    Raises:
        InvalidInput: The model has no token policy, there are no images, or the patches cannot be drawn.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model has no token policy, so there are no token samples.")
    if not len(images):
        raise InvalidInput("no image to show tokens on: give at least one.")
    if labels and len(labels) != len(images):
        raise InvalidInput(f"{len(labels)} labels for {len(images)} images: give one each, or none.")
    family, layout, policy = family_of(model), reduction.shape.layout, reduction.policy
    if layout.in_layers:
        raise InvalidInput("this model merges tokens anew in every layer, so no stage leaves patches to show.")
    weight = next(model.parameters())
    run = token_run(model, images.to(weight.device, weight.dtype), tracked=True)
    if run.trail and len(run.trail[0]) != len(images):
        raise InvalidInput("this model gets several images for one input, so the tokens of an input are no one grid.")
    left = patches_left_by(reduction, run, len(images))
    # If there is no trail, no stage pruned a token.
    counts = [indices.shape[1] for indices in run.trail] or [layout.patches] * len(policy.layers)
    return TokenSamples(
        images=_in_unit_range(images, model),
        left=left,
        policy=policy,
        tokens=tuple(layout.prefix + count for count in counts),
        grid=_grid(layout.patches, *family.input_shape(model)[1:]),
        labels=labels,
        groups=_groups(reduction, run),
    )


def patches_left_by(reduction: TokenReduction, run: TokenRun, images: int) -> Bool[Tensor, "images stages patches"]:
    """Returns the patches that are left after each stage, as `run` recorded them in a pass of `images` images.

    A patch counts as remaining if other patches were merged into it. It does not count if it was itself merged into
    another patch, or fused into a new token.
    """
    patches = reduction.shape.layout.patches
    # `run.trail` has one tensor of patch indices per stage, [images, patches after the stage].
    if not run.trail:  # a policy that keeps all patches runs no stage
        return torch.ones(images, len(reduction.policy.layers), patches, dtype=torch.bool)
    # Tokens that are not patches have the index -1. An extra column collects them, and is then cut off.
    none = torch.zeros(images, patches + 1, dtype=torch.bool, device=run.trail[0].device)
    masks = [none.scatter(1, indices.where(indices >= 0, patches), True)[:, :patches] for indices in run.trail]
    return torch.stack(masks, dim=1).cpu()


def _grid(patches: int, height: int, width: int) -> tuple[int, int]:
    """Returns the rows and columns of the grid of square patches in an image of this size."""
    # For square patches, rows * columns = patches and rows / columns = height / width.
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise InvalidInput(
            f"{patches} patches of images of {height} x {width} are not a grid of squares; they cannot be drawn."
        )
    return rows, patches // rows


def _groups(reduction: TokenReduction, run: TokenRun) -> Int[Tensor, "images stages patches"] | None:
    """Returns the index of the patch that represents each patch after every stage, or None if nothing is merged."""
    stages = zip(reduction.policy.layers, run.trail, strict=False)  # there is no trail if no stage pruned a token
    found = [(run.representatives(layer), indices) for layer, indices in stages]
    if not isinstance(reduction.policy.reducer, Merging) or all(tokens is None for tokens, _ in found):
        return None
    groups = []
    for tokens, indices in found:
        if tokens is None:  # no stage has merged patches so far
            groups.append(indices)
        else:  # under a mask no token is removed, so its index is the index of its patch
            groups.append(tokens if reduction.by == "mask" else indices.gather(1, tokens))
    return torch.stack(groups, dim=1).cpu()


def _label(samples: MapSamples | TokenSamples, index: int) -> str:
    return samples.labels[index] if samples.labels else f"image {index}"


def outputs(samples: MapSamples) -> dict[str, Any]:
    """Returns the report's data about maps: every model's map in colours, on the scale of the original model's map."""
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
    return {"images": images, "ramp": as_uri(colour(torch.linspace(0, 1, 128)[None], 0.0, 1.0))}


def tokens(samples: TokenSamples) -> dict[str, Any]:
    """Returns the report's data about tokens: the policy as a table, and pictures of each image after every stage."""
    policy, stages = samples.policy, []
    for layer, keep, left, count in zip(
        policy.layers, policy.keep, samples.left.unbind(1), samples.tokens, strict=True
    ):
        counts, share = left.sum(-1), float(left.double().mean())
        stages.append((layer, keep, (int(counts.min()), int(counts.max())), share, count))
    return {
        "reducer": str(policy.reducer),
        "stages": stages,
        "patches": samples.left.shape[2],
        "images": [_token_image(samples, index) for index in range(len(samples.images))],
        "merges": samples.groups is not None,
    }


def _token_image(samples: TokenSamples, index: int) -> dict[str, Any]:
    label, name, image = _label(samples, index), f"tokens-{index}", shown(samples.images[index].double().cpu())
    all_patches = torch.ones(samples.grid, dtype=torch.bool)
    # The page stores the pixels once, in the first picture of the image. The pictures of stages refer to them.
    unreduced = patch_picture(label, name, all_patches, as_uri(image))
    stages = [{"title": "image", "picture": unreduced, "note": f"{number(all_patches.numel())} patches"}]
    for stage, layer in enumerate(samples.policy.layers):
        left, groups, fills = samples.left[index, stage].view(samples.grid), None, {}
        if samples.groups is not None:
            groups = samples.groups[index, stage].view(samples.grid)
            fills = _group_fills(groups, image)
        count = f"{number(int(left.sum()))} of {number(left.numel())} patches left"
        picture = patch_picture(f"{label} before layer {layer}: {count}", name, left, groups=groups, fills=fills)
        stages.append({"title": f"before layer {layer}", "picture": picture, "note": count})
    return {"label": label, "stages": stages}


def left_pictures(samples: TokenSamples, index: int) -> Float[Tensor, "stages 3 height width"]:
    """Returns a picture of one image after every stage.

    Pruned patches are faded, and merged patches have the mean colour of their group. If the image has one channel, the
    pictures are grey.
    """
    image = as_colours(samples.images[index])
    if samples.groups is None:
        covered = ~samples.left[index]
        colours = image.new_full((len(covered), 3, covered.shape[1]), VEIL)
    else:
        groups, of_patches = samples.groups[index], pooled_patches(image, samples.grid)
        one_hot = F.one_hot(groups, groups.shape[1]).double()  # [stages, patches, groups]
        sizes = one_hot.sum(1)
        means = (of_patches @ one_hot) / sizes.clamp(min=1)[:, None]
        covered = sizes.gather(1, groups) > 1
        colours = means.gather(2, groups[:, None].expand(-1, 3, -1))
    rows, columns = samples.grid
    # Nearest interpolation from the grid to the size of the image gives every pixel the values of its patch.
    size, (fill, mask) = image.shape[1:], (colours.unflatten(2, (rows, columns)), covered.view(-1, 1, rows, columns))
    fill, mask = (F.interpolate(each.double(), size=size, mode="nearest") for each in (fill, mask))
    strength = 1.0 if samples.groups is not None else VEILED
    return image + strength * mask * (fill - image)


def pooled_patches(image: Float[Tensor, "channels height width"], grid: tuple[int, int]) -> Float[Tensor, "3 patches"]:
    """Returns the mean colour of every patch."""
    return F.adaptive_avg_pool2d(image, grid).flatten(1).expand(3, -1)


def _group_fills(groups: Int[Tensor, "rows columns"], image: Float[Tensor, "channels height width"]) -> dict[int, str]:
    """Returns the mean colour of every group of at least two patches."""
    rows, columns = groups.shape
    colours = pooled_patches(image, (rows, columns))
    fills, group_of_patch = {}, groups.flatten()
    for group in group_of_patch.unique().tolist():
        members = group_of_patch == group
        if int(members.sum()) > 1:
            mean = (255 * colours[:, members].mean(1)).round().int().tolist()
            fills[group] = "#" + "".join(f"{channel:02x}" for channel in mean)
    return fills


def colour(values: Float[Tensor, "height width"], low: float, high: float) -> Float[Tensor, "3 height width"]:
    """Maps values to colours, from dark blue at `low` to yellow at `high`."""
    ramp = torch.tensor([list(bytes.fromhex(code)) for code in _CIVIDIS.split()], dtype=torch.float64) / 255
    position = ((values.double() - low) / max(high - low, 1e-12)).clamp(0, 1).nan_to_num(0.0) * (len(ramp) - 1)
    # The highest value belongs to the last interval between two colours, because no interval begins at it.
    below = position.floor().long().clamp(max=len(ramp) - 2)
    mixed = torch.lerp(ramp[below], ramp[below + 1], (position - below)[..., None])
    return mixed.movedim(-1, 0).to(values.dtype)


def shown(image: Float[Tensor, "channels height width"]) -> Float[Tensor, "shown height width"]:
    """Returns an image that can be drawn. Unless it has 1, 3 or 4 channels, it is averaged over its channels."""
    return image if image.shape[0] in (1, 3, 4) else image.mean(0, keepdim=True)


def as_colours(image: Float[Tensor, "channels height width"]) -> Float[Tensor, "3 height width"]:
    """Returns an image with three channels, without transparency."""
    return shown(image.double().cpu())[:3].expand(3, -1, -1)


def as_uri(image: Float[Tensor, "channels height width"]) -> str:
    """Returns an image with values in [0, 1] as a PNG data URI. Channels are averaged as in `shown`."""
    from PIL import Image

    image = shown(image)
    pixels: UInt8[Tensor, "channels height width"] = (image.clamp(0, 1) * 255).round().to(torch.uint8).cpu()
    # Pillow accepts a single channel only without a channel axis.
    pixels = pixels.expand(3, -1, -1) if pixels.shape[0] == 1 else pixels
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def patch_picture(
    title: str,
    shown: str,
    left: Bool[Tensor, "rows columns"],
    address: str | None = None,
    groups: Int[Tensor, "rows columns"] | None = None,
    fills: Mapping[int, str] | None = None,
) -> str:
    """Returns an image as SVG, in which pruned or merged patches are marked. `shown` is the id of the image's pixels.

    Patches with the same number in `groups` were merged. Each group is outlined, and filled with its colour in `fills`,
    if there is one. Without groups, patches that are not `left` are covered. One unit of the SVG is one patch. The
    first picture of an image contains the pixels as the data URI `address`. Later pictures of the image refer to the
    pixels by their id.
    """
    rows, columns = left.shape
    size = f'width="{columns}" height="{rows}"'
    image = f'<use class="shown" href="#{shown}"/>'
    if address is not None:
        image = f'<image class="shown" id="{shown}" href="{address}" {size} preserveAspectRatio="none"/>'
    shapes = [image]
    # Outlines separate groups of merged patches or, without merging, kept patches from pruned patches.
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
    """Returns an SVG path with one rectangle for every run of consecutive true patches in a row."""
    # One rectangle per run keeps the page smaller than one rectangle per patch.
    path = ""
    for row, cells in enumerate(mask.tolist()):
        column = 0
        for is_marked, run in groupby(cells):
            length = len(list(run))
            path += f"M{column} {row}h{length}v1h-{length}z" if is_marked else ""
            column += length
    return path


def _outline(parts: list[list[int]]) -> str:
    """Returns an SVG path of the edges between neighbouring patches with different numbers in `parts`."""
    # Only the upper and left edges of patches are drawn, so that no edge is drawn twice.
    edges = ""
    for row, cells in enumerate(parts):
        for column, part in enumerate(cells):
            if row and parts[row - 1][column] != part:
                edges += f"M{column} {row}h1"
            if column and cells[column - 1] != part:
                edges += f"M{column} {row}v1"
    return edges
