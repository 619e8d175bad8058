"""Sample images: the attention received by their patches, and the patches kept after each stage."""

from typing import Any

import torch

from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.drawing import GAP_WIDTH, as_uri, colour, colour_ramp, mosaic, overlay, patch_picture
from attnrx.show.reports.numbers import TIMES, number, short
from attnrx.show.reports.sampling import AttentionSamples, MapSamples, TokenSamples
from attnrx.support.shapes import Float, Int, Tensor

# In powers of two: the colour scale of attention ends between 1.04 and 8 times uniform attention. The lower limit
# avoids amplified rounding of uniform heads, the upper one a scale set by one extreme head.
LEAST_REACH, MOST_REACH = 0.05, 3.0
OVERLAY_SIDE = 224  # small images are enlarged to this size, so that the overlaid map is smooth


def attention(content: ReportContent) -> Section | None:
    """Returns, per image and model, the last layer's attention over the image and a sheet of all layers and heads."""
    samples = content.attention
    if samples is None:
        return None
    # log2 of the attention relative to uniform attention: factors of 2 and 1/2 are symmetric around 0.
    relative = {name: (maps.double() * samples.tokens).clamp(min=1e-6).log2() for name, maps in samples.maps.items()}
    values = torch.stack(list(relative.values()))
    finite = values[~values.isnan()].abs()
    # The scale contains 99 % of the values; torch.quantile takes no more than 16 million.
    reach = float(torch.quantile(finite[:: max(1, finite.numel() // 1_000_000)], 0.99)) if finite.numel() else 0.0
    reach = min(max(reach, LEAST_REACH), MOST_REACH)
    data = {
        "images": [_attention_image(samples, relative, index, reach) for index in range(len(samples.images))],
        "layers": values.shape[2],
        "heads": values.shape[3],
        "ramp": colour_ramp(),
        "reach": short(2**reach, 3) + TIMES,
    }
    return Section("attention", "Attention maps", data)


def _attention_image(
    samples: AttentionSamples, relative: dict[str, Tensor], index: int, reach: float
) -> dict[str, Any]:
    image = _enlarged(samples.images[index].double().cpu(), OVERLAY_SIDE // samples.images.shape[-1])
    first, models = next(iter(relative)), []
    for name, maps in relative.items():
        grids = maps[index].cpu().unflatten(-1, (samples.side, samples.side))
        # The mean over the heads of the last layer, of the attention itself and not of its logarithm.
        last = grids[-1].exp2().nanmean(0).log2().nan_to_num(0.0)
        sheet = mosaic(_enlarged(grids, 24 * GAP_WIDTH // samples.side))  # pixels are much larger than the gaps
        model = {
            "name": name,
            "overlay": as_uri(overlay(image, last, -reach, reach)),
            "sheet": as_uri(colour(sheet, -reach, reach)),
            "change": "" if name == first else _change(samples.maps[first][index], samples.maps[name][index]),
        }
        models.append(model)
    return {"label": _label(samples, index), "picture": as_uri(image), "models": models}


def _change(before: Float[Tensor, "layers heads tokens"], after: Float[Tensor, "layers heads tokens"]) -> str:
    """Describes the share of attention that moved between patches: half the 1-norm of the change."""
    moved = (after - before).double().abs().sum(-1) / 2
    moved = moved[~moved.isnan()]
    if not moved.numel():
        return "no common head to compare"
    mean, most = (number(100 * float(value), 2) for value in (moved.mean(), moved.max()))
    return f"{mean} % of a head's attention moved on average, {most} % at most"


def _enlarged(pixels: Float[Tensor, "*more height width"], factor: int) -> Float[Tensor, "*more rows columns"]:
    return pixels.repeat_interleave(max(1, factor), -1).repeat_interleave(max(1, factor), -2)


def _label(samples: AttentionSamples | MapSamples | TokenSamples, index: int) -> str:
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
