"""Attention maps: the attention received by the patches of sample images in original, masked and compressed model."""

from typing import Any

import torch

from attnrx.reports.content import AttentionSamples, ReportContent
from attnrx.reports.figures import GAP_WIDTH, as_uri, colour, colour_ramp, mosaic, overlay
from attnrx.reports.numbers import TIMES, number, short
from attnrx.reports.sections.section import Section
from attnrx.shapes import Float, Tensor

LEAST_REACH, MOST_REACH = (
    0.05,
    3.0,
)  # in powers of two: the colour scale ends between 1.04 and 8 times uniform attention
OVERLAY_SIDE = 224  # small images are enlarged to this size, so that the overlaid map is smooth


def attention(content: ReportContent) -> Section | None:
    """Returns, per image and model, the last layer's attention over the image and a sheet of all layers and heads."""
    samples = content.attention
    if samples is None:
        return None
    # log2 of the attention relative to uniform attention: factors of 2 and 1/2 are symmetric around 0.
    relative = {name: (maps.double() * samples.tokens).clamp(min=1e-6).log2() for name, maps in samples.maps.items()}
    low, high = _limits(torch.stack(list(relative.values())))
    images = [_image(samples, relative, index, (low, high)) for index in range(samples.images.shape[0])]
    first = next(iter(samples.maps.values()))
    data = {
        "images": images,
        "layers": first.shape[1],
        "heads": first.shape[2],
        "ramp": colour_ramp(),
        "reach": short(2**high, 3) + TIMES,
    }
    return Section("attention", "Attention maps", data)


def _limits(maps: Float[Tensor, "models images layers heads tokens"]) -> tuple[float, float]:
    """Returns a range around uniform attention that contains 99 % of the values."""
    finite = maps[~maps.isnan()].abs()
    reach = float(torch.quantile(finite[:: max(1, finite.numel() // 1_000_000)], 0.99)) if finite.numel() else 0.0
    # The lower limit avoids amplified rounding of uniform heads, the upper limit a scale set by one extreme head.
    reach = min(max(reach, LEAST_REACH), MOST_REACH)
    return -reach, reach


def _image(
    samples: AttentionSamples, relative: dict[str, Tensor], index: int, limits: tuple[float, float]
) -> dict[str, Any]:
    names = list(relative)
    image = samples.images[index].double().cpu()
    models = [
        {
            "name": name,
            "overlay": as_uri(overlay(_enlarged(image), _last_layer(samples, relative[name][index]), *limits)),
            "sheet": as_uri(colour(_sheet(samples, relative[name][index]), *limits)),
            "change": "" if name == names[0] else _change(samples, names[0], name, index),
        }
        for name in names
    ]
    label = samples.labels[index] if samples.labels else f"image {index}"
    return {"label": label, "picture": as_uri(_enlarged(image)), "models": models}


def _sheet(samples: AttentionSamples, maps: Float[Tensor, "layers heads tokens"]) -> Float[Tensor, "rows columns"]:
    """Arranges all layers and heads in one sheet, with pixels much larger than the gaps."""
    factor = max(1, 24 * GAP_WIDTH // samples.side)
    grids = maps.cpu().unflatten(-1, (samples.side, samples.side))
    return mosaic(grids.repeat_interleave(factor, -1).repeat_interleave(factor, -2))


def _last_layer(samples: AttentionSamples, maps: Float[Tensor, "layers heads tokens"]) -> Float[Tensor, "rows columns"]:
    mean = maps[-1].exp2().nanmean(0).log2().cpu()
    return mean.nan_to_num(0.0).unflatten(-1, (samples.side, samples.side))


def _change(samples: AttentionSamples, first: str, name: str, index: int) -> str:
    """Describes the share of attention that moved between patches: half the 1-norm of the change."""
    moved = (samples.maps[name][index] - samples.maps[first][index]).double().abs().sum(-1) / 2
    moved = moved[~moved.isnan()]
    if not moved.numel():
        return "no common head to compare"
    mean, most = (number(100 * float(value), 2) for value in (moved.mean(), moved.max()))
    return f"{mean} % of a head's attention moved on average, {most} % at most"


def _enlarged(image: Float[Tensor, "channels height width"]) -> Float[Tensor, "channels rows columns"]:
    factor = max(1, OVERLAY_SIDE // image.shape[-1])
    return image.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
