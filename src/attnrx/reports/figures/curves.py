"""Curves over a common axis, with intervals or bands, each distinguished by its colour and by its marker."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from attnrx.reports.figures.drawing import AxisScale, Drawing, log_span, span
from attnrx.reports.numbers import Number, number

STYLES = 6  # colours of curves, .style-0 to .style-5 in the style sheet
MOST_MARKERS = 12  # the largest number of markers on a curve
DODGE = 5.0  # curves with intervals are shifted horizontally by this much, so that whiskers do not overlap
WIDTH, HEIGHT = 360.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 350.0, 26.0, 190.0

# Markers by position in the legend, so that curves differ without colour; drawn around the origin.
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.6L4.4 3.4H-4.4z",
    "M0 -5L5 0L0 5L-5 0z",
    "M0 4.6L4.4 -3.4H-4.4z",
    "M-4.5 -1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",
)


@dataclass(frozen=True)
class CurvePoint:
    """One point of a curve, with its interval and tooltip."""

    x: Number
    y: Number
    low: Number | None = None
    high: Number | None = None
    tip: str = ""


@dataclass(frozen=True)
class Curve:
    """Points in order of x; `style` is the CSS class of the colour, `marker` an index into MARKERS or None."""

    name: str
    points: tuple[CurvePoint, ...]
    style: str
    marker: int | None = None

    @classmethod
    def numbered(cls, index: int, name: str, points: Iterable[CurvePoint]) -> "Curve":
        """Returns a curve with the colour and the marker of its place in a chart."""
        return cls(name, tuple(points), f"style-{index % STYLES}", index)


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes; `level` draws a horizontal line, and `band` fills the intervals as an area."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    logarithmic: bool = False
    level: Number | None = None
    band: bool = False

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """A small picture of every curve's line and marker, with its name."""
        return tuple((_marker_picture(curve), curve.name) for curve in self.curves)

    def draw(self) -> str:
        points = [point for curve in self.curves for point in curve.points]
        ends = (
            f"{curve.name}: from {number(curve.points[0].y)} to {number(curve.points[-1].y)}"
            for curve in self.curves
            if curve.points
        )
        drawing = Drawing(WIDTH, HEIGHT, self.title, f"Over {self.x_label}. {'; '.join(ends)}.")
        x, y = self._scales(points)
        _draw_axes(drawing, x, y, (self.x_label, self.y_label))
        if self.level is not None:
            drawing.add("line", "zero", x1=LEFT, x2=RIGHT, y1=y(self.level), y2=y(self.level))
        for curve in self.curves if self.band else ():  # all bands lie below all lines
            _draw_band(drawing, curve, x, y)
        dodge = 0.0 if self.band or all(point.low is None for point in points) else DODGE
        for index, curve in enumerate(self.curves):
            shift = dodge * (index - (len(self.curves) - 1) / 2)
            shifted = replace(x, start=x.start + shift, stop=x.stop + shift)
            if len(curve.points) > 1:
                line = _polyline([(shifted(point.x), y(point.y)) for point in curve.points])
                drawing.add("path", f"curve {curve.style}", d=line)
            if not self.band:
                _draw_intervals(drawing, curve, shifted, y)
            _draw_markers(drawing, curve, shifted, y)
        return drawing.svg()

    def _scales(self, points: list[CurvePoint]) -> tuple[AxisScale, AxisScale]:
        heights = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
        extra = () if self.level is None else (self.level,)
        low, high = log_span(heights) if self.logarithmic else span(heights, include=extra)
        left, right = span((point.x for point in points), room=0.04)
        whole = all(point.x == int(point.x) for point in points)
        return AxisScale(left, right, LEFT, RIGHT, whole=whole), AxisScale(low, high, BOTTOM, TOP, self.logarithmic)


def _marker_picture(curve: Curve) -> str:
    drawing = Drawing(26, 12, curve.name)
    drawing.add("path", f"curve {curve.style}", d="M1 6H25")
    if curve.marker is not None:
        shape = MARKERS[curve.marker % len(MARKERS)]
        drawing.add("path", f"marker {curve.style}", d=shape, transform="translate(13 6)")
    return drawing.svg()


def _draw_axes(drawing: Drawing, x: AxisScale, y: AxisScale, labels: tuple[str, str]) -> None:
    for tick, words in y.labels():
        drawing.add("line", "grid", x1=LEFT, x2=RIGHT, y1=y(tick), y2=y(tick))
        drawing.text(LEFT - 6, y(tick) + 4, words, "label", "end")
    for tick, words in x.labels(5):
        drawing.add("line", "tick", x1=x(tick), x2=x(tick), y1=BOTTOM, y2=BOTTOM + 4)
        drawing.text(x(tick), BOTTOM + 17, words, "label", "middle")
    drawing.add("line", "axis", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM)
    drawing.text(RIGHT, HEIGHT - 6, labels[0], "label", "end")
    drawing.text(4, 12, labels[1], "label")


def _draw_band(drawing: Drawing, curve: Curve, x: AxisScale, y: AxisScale) -> None:
    bounded = [(own.x, own.low, own.high) for own in curve.points if own.low is not None and own.high is not None]
    if len(bounded) == 1:
        _draw_intervals(drawing, curve, x, y)
    if len(bounded) > 1:
        upper = [(x(point_x), y(high)) for point_x, _, high in bounded]
        # On a logarithmic axis the lower end may be zero or negative.
        lower = [(x(point_x), y(max(low, y.low))) for point_x, low, _ in reversed(bounded)]
        drawing.add("path", f"band {curve.style}", d=_polyline([*upper, *lower]) + "z")


def _draw_intervals(drawing: Drawing, curve: Curve, x: AxisScale, y: AxisScale) -> None:
    for point in curve.points:
        if point.low is not None and point.high is not None:
            middle, low, high = x(point.x), y(point.low), y(point.high)
            stroke = f"M{middle - 3:.2f} {low:.2f}h6m-3 0V{high:.2f}m-3 0h6"
            drawing.add("path", f"whisker {curve.style}", d=stroke)


def _draw_markers(drawing: Drawing, curve: Curve, x: AxisScale, y: AxisScale) -> None:
    every = math.ceil(len(curve.points) / MOST_MARKERS)  # counted from the last point, which always has a marker
    for index, point in enumerate(curve.points):
        position = f"translate({x(point.x):.2f} {y(point.y):.2f})"
        if curve.marker is not None and (len(curve.points) - 1 - index) % every == 0:
            shape = MARKERS[curve.marker % len(MARKERS)]
            drawing.add("path", f"marker {curve.style}", point.tip, d=shape, transform=position)
        elif point.tip:
            drawing.add("circle", "target", point.tip, r=5, transform=position)


def _polyline(points: list[tuple[Number, Number]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
