"""The trade-off: removed directions against accuracy and discrepancy over rho, for every kind of realization."""

from collections.abc import Callable, Sequence
from typing import Any

from attnrx.reports.content import ReportContent, TradeOffPoint
from attnrx.reports.figures import Chart, Curve, CurvePoint, marker_picture
from attnrx.reports.numbers import interval, number, percent, quantity, short
from attnrx.reports.sections.section import Figure, Section


def trade_off(content: ReportContent) -> Section | None:
    """Returns two charts over the removed share, and the numbers as a table."""
    points = content.trade_off
    if not points:
        return None
    kinds = list(dict.fromkeys(point.kind for point in points))
    changes = _curves(points, kinds, lambda point: (point.accuracy_change, point.accuracy_interval))
    discrepancies = _curves(points, kinds, lambda point: (point.discrepancy, point.discrepancy_interval))
    positive = all(point.discrepancy > 0 for point in points)
    across = "% of directions removed"
    charts = [
        Chart("Change of accuracy over removed directions", across, "accuracy change in points", changes, level=0.0),
        Chart(
            "Relative logit discrepancy over removed directions",
            across,
            "logit discrepancy (Eq. 46)",
            discrepancies,
            positive,
        ),
    ]
    figures = [Figure(chart.draw(), chart.title) for chart in charts]
    legend = [(marker_picture(curve), curve.name) for curve in changes]
    return Section(
        "trade-off", "Trade-off", {"figures": figures, "legend": legend, "rows": [_row(point) for point in points]}
    )


def _curves(
    points: Sequence[TradeOffPoint], kinds: list[str], read: Callable[[TradeOffPoint], tuple]
) -> tuple[Curve, ...]:
    curves = []
    for index, kind in enumerate(kinds):
        ordered = sorted((point for point in points if point.kind == kind), key=lambda point: point.removed_share)
        curves.append(Curve(kind, tuple(_point(point, *read(point)) for point in ordered), f"style-{index % 6}", index))
    return tuple(curves)


def _point(point: TradeOffPoint, value: float, within: tuple[float, float] | None) -> CurvePoint:
    low, high = within or (None, None)
    tip = f"{point.kind}, rho {short(point.rho)}: {percent(point.removed_share)} removed, {number(value)}"
    return CurvePoint(100 * point.removed_share, value, low, high, f"{tip} {interval(low, high)}".rstrip())


def _row(point: TradeOffPoint) -> dict[str, Any]:
    change, discrepancy = point.accuracy_interval or (None, None), point.discrepancy_interval or (None, None)
    return {
        "rho": short(point.rho),
        "kind": point.kind,
        "removed": percent(point.removed_share),
        "change": quantity(point.accuracy_change, "points", *change, signed=True),
        "change_interval": interval(*change),
        "discrepancy": quantity(point.discrepancy, "", *discrepancy),
        "discrepancy_interval": interval(*discrepancy),
    }
