"""Training: losses, accuracies and the indicators of every layer over the epochs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attnrx.reports.content import ReportContent
from attnrx.reports.figures import LEVELS, Chart, Curve, CurvePoint, marker_picture
from attnrx.reports.numbers import number
from attnrx.reports.sections.section import Figure, Section

SCALARS = (("loss", "Loss"), ("accuracy", "Accuracy"))
FEW = 3

Record = Mapping[str, Any]


def training(content: ReportContent) -> Section | None:
    """Returns one chart for the losses, one for the accuracies, and one per indicator with a curve for each layer."""
    if not content.history:
        return None
    scalars = [figure for figure in (_scalar(content.history, *kind) for kind in SCALARS) if figure is not None]
    names = list(dict.fromkeys(name for record in content.history for layer in _layers(record) for name in layer))
    charts = [_indicator(content.history, name) for name in names]
    legend = [(marker_picture(curve), curve.name) for curve in charts[0].curves] if charts else []
    indicators = [Figure(chart.draw(), chart.title) for chart in charts]
    if not scalars and not indicators:
        return None
    data = {"scalars": scalars, "indicators": indicators, "legend": legend, "epochs": len(content.history)}
    return Section("training", "Training", data)


def _scalar(history: Sequence[Record], word: str, title: str) -> Figure | None:
    """Draws all numbers of the records whose name contains the word."""
    names = dict.fromkeys(
        name for record in history for name, value in record.items() if word in name and isinstance(value, int | float)
    )
    curves = tuple(
        Curve(_spelled(name), _points(history, name), f"style-{index % 6}", index) for index, name in enumerate(names)
    )
    if not curves:
        return None
    chart = Chart(f"{title} over the epochs", "epoch", "", curves)
    legend = tuple((marker_picture(curve), curve.name) for curve in curves)
    return Figure(chart.draw(), title, legend=legend if len(legend) > 1 else ())


def _spelled(name: str) -> str:
    """Returns the name of a curve; records use bare names for training values."""
    return name.replace("_", " ") if "_" in name else f"training {name}"


def _points(history: Sequence[Record], name: str) -> tuple[CurvePoint, ...]:
    found = [(_epoch(record, index), record.get(name)) for index, record in enumerate(history)]
    return tuple(
        CurvePoint(epoch, value, tip=f"epoch {epoch:g}: {number(value, 4)}")
        for epoch, value in found
        if value is not None
    )


def _indicator(history: Sequence[Record], name: str) -> Chart:
    """Draws the mean over the heads of each layer, with a band from the minimum to the maximum."""
    depth = max(len(_layers(record)) for record in history)
    marker = None if len(history) > FEW else 0  # a line through one point is invisible
    curves = tuple(
        Curve(f"layer {layer}", _layer_points(history, name, layer), f"level-{_step(layer, depth)}", marker)
        for layer in range(depth)
    )
    title = name.replace("_", " ").capitalize()
    return Chart(title, "epoch", "", tuple(curve for curve in curves if curve.points), band=True)


def _layers(record: Record) -> Sequence[Mapping[str, Sequence[float | None]]]:
    """Returns the indicators of an epoch: for each layer a mapping from name to one number per head."""
    return record.get("layers", ())


def _layer_points(history: Sequence[Record], name: str, layer: int) -> tuple[CurvePoint, ...]:
    points = []
    for index, record in enumerate(history):
        readings = _layers(record)[layer].get(name, ()) if layer < len(_layers(record)) else ()
        heads = [value for value in readings if value is not None]
        if heads:
            epoch, mean = _epoch(record, index), fmean(heads)
            head_range = f"{number(min(heads))} to {number(max(heads))} over the heads"
            tip = f"epoch {epoch:g}, layer {layer}: {number(mean)} ({head_range})"
            points.append(CurvePoint(epoch, mean, min(heads), max(heads), tip))
    return tuple(points)


def _epoch(record: Record, index: int) -> float:
    return float(record.get("epoch", index))


def _step(layer: int, depth: int) -> int:
    # The palest steps are not visible on the page.
    return LEVELS - 1 if depth < 2 else 3 + round(layer * (LEVELS - 4) / (depth - 1))
