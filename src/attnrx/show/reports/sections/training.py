"""Training: losses, accuracies and the indicators of every layer over the epochs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attnrx.show.reports.content import ReportContent, Section
from attnrx.show.reports.figures import LEVELS, Chart, Curve, CurvePoint, Figure
from attnrx.show.reports.numbers import number

SCALARS = (("loss", "Loss"), ("accuracy", "Accuracy"))
FEW = 3  # epochs: a line through so few points needs markers, one through a single point is invisible

Record = Mapping[str, Any]


def training(content: ReportContent) -> Section | None:
    """Returns one chart for the losses, one for the accuracies, and one per indicator with a curve for each layer."""
    epochs = [float(record.get("epoch", index)) for index, record in enumerate(content.history)]
    history = list(zip(epochs, content.history, strict=True))
    scalars = [figure for figure in (_scalars(history, *kind) for kind in SCALARS) if figure is not None]
    layers = [layer for record in content.history for layer in record.get("layers", ())]
    # dict.fromkeys: names once, in the order of the records.
    charts = [_indicator(history, name) for name in dict.fromkeys(name for layer in layers for name in layer)]
    if not scalars and not charts:
        return None
    data = {
        "scalars": scalars,
        "indicators": [Figure.from_chart(chart) for chart in charts],
        "legend": charts[0].legend if charts else (),
        "epochs": len(history),
    }
    return Section("training", "Training", data, f"Losses and accuracies of {len(history)} epochs")


def _scalars(history: Sequence[tuple[float, Record]], word: str, title: str) -> Figure | None:
    """Draws all numbers of the records whose name contains the word."""
    points: dict[str, list[CurvePoint]] = {}
    for epoch, record in history:
        for name, value in record.items():
            if word in name and isinstance(value, int | float):
                point = CurvePoint(epoch, value, tip=f"epoch {epoch:g}: {number(value, 4)}")
                points.setdefault(name, []).append(point)
    if not points:
        return None
    # Records use bare names for training values.
    names = [name.replace("_", " ") if "_" in name else f"training {name}" for name in points]
    curves = [
        Curve.numbered(index, *named_points)
        for index, named_points in enumerate(zip(names, points.values(), strict=True))
    ]
    chart = Chart(f"{title} over the epochs", "epoch", "", tuple(curves))
    return Figure(chart.draw(), title, legend=chart.legend if len(curves) > 1 else ())


def _indicator(history: Sequence[tuple[float, Record]], name: str) -> Chart:
    """Draws the mean over the heads of each layer, with a band from the minimum to the maximum."""
    depth = max(len(record.get("layers", ())) for _, record in history)
    points: list[list[CurvePoint]] = [[] for _ in range(depth)]
    for epoch, record in history:
        for index, layer in enumerate(record.get("layers", ())):
            # JSON has null in place of NaN.
            heads = [value for value in layer.get(name, ()) if value is not None]
            if heads:
                mean, low, high = fmean(heads), min(heads), max(heads)
                head_range = f"{number(low)} to {number(high)} over the heads"
                tip = f"epoch {epoch:g}, layer {index}: {number(mean)} ({head_range})"
                points[index].append(CurvePoint(epoch, mean, low, high, tip))
    marker = None if len(history) > FEW else 0
    curves = []
    for layer, layer_points in enumerate(points):
        # The palest steps are not visible on the page.
        step = LEVELS - 1 if depth < 2 else 3 + round(layer * (LEVELS - 4) / (depth - 1))
        if layer_points:
            curves.append(Curve(f"layer {layer}", tuple(layer_points), f"level-{step}", marker))
    return Chart(name.replace("_", " ").capitalize(), "epoch", "", tuple(curves), band=True)
