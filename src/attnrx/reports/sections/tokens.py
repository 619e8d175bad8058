"""Tokens: the patches of sample images kept after each stage, and their relevance."""

from typing import Any

import torch

from attnrx.reports.content import ReportContent, TokenSamples
from attnrx.reports.figures import Chart, Curve, CurvePoint, PatchPicture, as_uri, colour, colour_ramp, marker_picture
from attnrx.reports.numbers import TIMES, number, percent, short
from attnrx.reports.sections.section import Figure, Section
from attnrx.shapes import Float, Tensor

MOST_REACH = 3.0  # in powers of two: relevance from an eighth to eight times that of the mean patch


def tokens(content: ReportContent) -> Section | None:
    """Returns the policy as a table and a chart, and per image a picture per stage and relevance maps."""
    samples = content.tokens
    if samples is None:
        return None
    data = {
        "reducer": str(samples.policy.reducer),
        "stages": _stages(samples),
        "chart": _chart(samples),
        "images": [_image(samples, index) for index in range(len(samples.images))],
        "gives": samples.given is not None,
        "sources": samples.by_layer is not None,
        "ramp": colour_ramp(),
        "reach": short(2**MOST_REACH) + TIMES,
    }
    return Section("tokens", "Tokens", data)


def _stages(samples: TokenSamples) -> list[dict[str, str]]:
    patches = samples.left.shape[2]
    rows = []
    for stage, layer in enumerate(samples.policy.layers):
        counts = sorted(set(samples.left[:, stage].sum(-1).tolist()))
        spread = number(counts[0]) if len(counts) == 1 else f"{number(counts[0])} to {number(counts[-1])}"
        share = float(samples.left[:, stage].double().mean())
        rows.append(
            {
                "layer": str(layer),
                "requested": percent(samples.policy.keep[stage]),
                "left": f"{spread} of {number(patches)} ({percent(share)})",
                "tokens": number(samples.tokens[layer - 1]),
            }
        )
    return rows


def _chart(samples: TokenSamples) -> Figure:
    depth, all_tokens = len(samples.tokens), samples.tokens[0]
    curves = (
        Curve("no token reduction", _points((all_tokens,) * depth), "style-5"),
        Curve("this model", _points(samples.tokens), "style-0", 0),
    )
    chart = Chart("Tokens in every layer", "layer", "tokens", curves, level=0)
    legend = tuple((marker_picture(curve), curve.name) for curve in curves)
    return Figure(chart.draw(), "Tokens in every layer", legend=legend)


def _points(counts: tuple[int, ...]) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(layer, count, tip=f"layer {layer}: {count} tokens") for layer, count in enumerate(counts, 1)
    )


def _image(samples: TokenSamples, index: int) -> dict[str, Any]:
    label = samples.labels[index] if samples.labels else f"image {index}"
    shown, grid = f"tokens-{index}", samples.grid
    all_patches = torch.ones(grid, dtype=torch.bool)
    address = as_uri(samples.images[index].double().cpu())
    stages = [
        {
            "title": "image",
            "picture": PatchPicture(label, shown, all_patches, address).draw(),
            "note": f"{number(all_patches.numel())} patches",
            "given": "",
        }
    ]
    for stage, layer in enumerate(samples.policy.layers):
        left = samples.left[index, stage]
        count = f"{number(int(left.sum()))} of {number(left.numel())} patches left"
        words = f"{label} before layer {layer}: {count}, {_where(left.view(grid))}"
        stages.append(
            {
                "title": f"before layer {layer}",
                "picture": PatchPicture(words, shown, left.view(grid)).draw(),
                "note": count,
                "given": _given(samples, index, stage),
            }
        )
    return {"label": label, "stages": stages, "sources": _sources(samples, index)}


def _where(left: Tensor) -> str:
    """Describes the position of the kept patches by their share in each half of the image."""
    share = left.double()
    rows, columns = share.shape
    if not float(share.sum()):
        return "no patch at its original position"
    parts = {
        "upper half": share[: -(-rows // 2)].mean(),
        "lower half": share[rows // 2 :].mean(),
        "left half": share[:, : -(-columns // 2)].mean(),
        "right half": share[:, columns // 2 :].mean(),
    }
    return "; ".join(f"{name} {percent(float(part), 2)}" for name, part in parts.items())


def _given(samples: TokenSamples, index: int, stage: int) -> str:
    """Draws the remaining patches coloured by the rank of their relevance; empty without relevance."""
    if samples.given is None:
        return ""
    given = samples.given[index, stage]
    known = ~given.isnan()
    if not bool(known.any()):
        return ""
    order = torch.full_like(given, torch.nan)
    order[known] = given[known].argsort().argsort().double()
    coloured = colour(order.view(samples.grid), 0.0, float(max(int(known.sum()) - 1, 1)))
    return as_uri(torch.cat([coloured, known.view(1, *samples.grid).to(coloured.dtype)]))


def _sources(samples: TokenSamples, index: int) -> list[dict[str, Any]]:
    if samples.by_layer is None:
        return []
    return [
        {
            "name": name.replace("_", " "),
            "layers": [as_uri(colour(map, -MOST_REACH, MOST_REACH)) for map in _relative(samples, maps[index])],
        }
        for name, maps in samples.by_layer.items()
    ]


def _relative(samples: TokenSamples, maps: Float[Tensor, "layers patches"]) -> Float[Tensor, "layers rows columns"]:
    """Returns log2 of the relevance relative to the mean patch of the layer."""
    relative = (maps / maps.mean(-1, keepdim=True)).clamp_min(1e-6).log2()
    return relative.unflatten(-1, samples.grid)
