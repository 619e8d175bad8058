"""Sample images: the patches kept after each stage, and the maps that models return."""

from typing import Any

import torch

from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.drawing import as_uri, colour, colour_ramp, patch_picture
from attnrx.show.reports.numbers import number
from attnrx.show.reports.sampling import MapSamples, TokenSamples
from attnrx.support.shapes import Float, Int, Tensor


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
