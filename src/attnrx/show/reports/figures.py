"""Figures: plain values to SVG, independent of diagnoses and prescriptions.

Curves over a common axis, heat maps of heads, and images with pruned patches. Drawn
here and not by a library: colours follow the page (light and dark), texts are selectable and read by screen readers,
cells and points are moved through by the script of the page, and a chart has 2 to 13 kB.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from attnrx.show.reports.drawing import AxisScale, Drawing, span
from attnrx.show.reports.numbers import Number, number
from attnrx.support.shapes import Bool, Int, Tensor

STYLES = 6  # colours of curves, .style-0 to .style-5 in the style sheet
LEVELS = 9  # steps of the sequential colour scale, .level-0 to .level-8 in the style sheet

# In the units of a picture, which the page scales.
WIDTH, HEIGHT = 360.0, 230.0  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 54.0, 350.0, 26.0, 190.0  # the ends of its axes

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
    """Points in order of x, with the colour and the marker of the place `index` in the legend."""

    name: str
    points: tuple[CurvePoint, ...]
    index: int

    @property
    def style(self) -> str:
        """The CSS class of the colour."""
        return f"style-{self.index % STYLES}"

    @property
    def marker(self) -> str:
        """The path of the marker; after STYLES curves the colours repeat, with other markers."""
        return MARKERS[(self.index + self.index // STYLES) % len(MARKERS)]


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes, with their intervals as areas; `level` draws a horizontal line."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    level: Number | None = None

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """A small picture of every curve's line and marker, with its name."""
        return tuple((_marker_picture(curve), curve.name) for curve in self.curves)

    def draw(self) -> str:
        ends = (
            f"{curve.name}: from {number(curve.points[0].y)} to {number(curve.points[-1].y)}"
            for curve in self.curves
            if curve.points
        )
        drawing = Drawing(WIDTH, HEIGHT, self.title, f"Over {self.x_label}. {'; '.join(ends)}.")
        x, y = self._scales()
        _draw_axes(drawing, x, y, (self.x_label, self.y_label))
        if self.level is not None:
            drawing.add("line", "zero", x1=LEFT, x2=RIGHT, y1=y(self.level), y2=y(self.level))
        for curve in self.curves:  # all bands lie below all lines
            _draw_band(drawing, curve, x, y)
        for curve in self.curves:
            if len(curve.points) > 1:
                line = _polyline([(x(point.x), y(point.y)) for point in curve.points])
                drawing.add("path", f"curve {curve.style}", d=line)
            for point in curve.points:
                position = f"translate({x(point.x):.2f} {y(point.y):.2f})"
                drawing.add("path", f"marker {curve.style}", point.tip, d=curve.marker, transform=position)
        return drawing.svg()

    def _scales(self) -> tuple[AxisScale, AxisScale]:
        points = [point for curve in self.curves for point in curve.points]
        heights = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
        low, high = span(heights, include=() if self.level is None else (self.level,))
        left, right = span((point.x for point in points), room=0.04)
        return AxisScale(left, right, LEFT, RIGHT), AxisScale(low, high, BOTTOM, TOP)


def _marker_picture(curve: Curve) -> str:
    drawing = Drawing(26, 12, curve.name)
    drawing.add("path", f"curve {curve.style}", d="M1 6H25")
    drawing.add("path", f"marker {curve.style}", d=curve.marker, transform="translate(13 6)")
    return drawing.svg()


def _draw_axes(drawing: Drawing, x: AxisScale, y: AxisScale, labels: tuple[str, str]) -> None:
    for tick, words in y.labels():
        drawing.add("line", "grid", x1=LEFT, x2=RIGHT, y1=y(tick), y2=y(tick))
        drawing.text(LEFT - 6, y(tick) + 4, words, "label", "end")
    for tick, words in x.labels(5):
        drawing.add("line", "tick", x1=x(tick), x2=x(tick), y1=BOTTOM, y2=BOTTOM + 4)
        drawing.text(x(tick), BOTTOM + 17, words, "label", "middle")
    drawing.add("line", "axis", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM)
    across, up = (
        f"{words}, in units of {number(10.0**axis.power, 1)}" if axis.power else words
        for words, axis in zip(labels, (x, y), strict=True)
    )
    drawing.text(RIGHT, HEIGHT - 6, across, "label", "end")
    drawing.text(4, 12, up, "label")


def _draw_band(drawing: Drawing, curve: Curve, x: AxisScale, y: AxisScale) -> None:
    bounded = [
        (point.x, point.low, point.high) for point in curve.points if point.low is not None and point.high is not None
    ]
    if len(bounded) == 1:  # whose band would have no area
        middle, low, high = (axis(value) for axis, value in zip((x, y, y), bounded[0], strict=True))
        stroke = f"M{middle - 3:.2f} {low:.2f}h6m-3 0V{high:.2f}m-3 0h6"
        drawing.add("path", f"whisker {curve.style}", d=stroke)
    if len(bounded) > 1:
        upper = [(x(point_x), y(high)) for point_x, _, high in bounded]
        lower = [(x(point_x), y(low)) for point_x, low, _ in reversed(bounded)]
        drawing.add("path", f"band {curve.style}", d=_polyline([*upper, *lower]) + "z")


def _polyline(points: list[tuple[Number, Number]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


@dataclass(frozen=True)
class Figure:
    """A picture with heading and caption; `note` follows the heading."""

    picture: str
    title: str
    note: str = ""
    caption: str = ""


@dataclass(frozen=True)
class HeatMap:
    """Rows are layers, columns are heads of the original model unless `columns` names them; None for a pruned head.

    A row with a single value is one cell across all columns, for a shared quantity. The cells show the values, or
    `texts`; `tips` are their tooltips, also used for screen readers. `heads` are the keys of the spectra that the page
    shows for the cells, empty for a cell without one.
    """

    title: str
    values: Sequence[Sequence[Number | None]]
    low: Number
    high: Number
    write: Callable[[Number], str] = number
    dense: bool = False  # smaller cells, for many columns
    columns: tuple[str, ...] = ()
    texts: Sequence[Sequence[str]] | None = None
    tips: Sequence[Sequence[str]] | None = None
    heads: Sequence[Sequence[str]] | None = None

    def draw(self) -> str:
        names = self.columns or tuple(f"head {head}" for head in range(max(len(row) for row in self.values)))
        texts = self.texts or [["removed" if cell is None else self.write(cell) for cell in row] for row in self.values]
        # A row of a shared quantity has one value for all columns.
        tips = self.tips or [[f"{name}: {text}" for name, text in zip(names, row, strict=False)] for row in texts]
        rows = (f"layer {layer}: {', '.join(row)}" for layer, row in enumerate(self.tips or texts))
        width, height, left, top = (33, 26, 60, 22) if self.dense else (46, 32, 60, 22)
        size = left + len(names) * width, top + len(self.values) * height
        drawing = Drawing(*size, self.title, "; ".join(rows) + ".")
        for column, name in enumerate(names):
            shown = name.removeprefix("head ") if self.dense else name
            drawing.text(left + (column + 0.5) * width, top - 8, shown, "label", "middle")
        for layer, row in enumerate(self.values):
            y = top + layer * height
            drawing.text(left - 8, y + height / 2 + 4, f"layer {layer}", "label", "end")
            # A single value belongs to all heads of the layer.
            across = width * len(names) if len(row) == 1 else width
            for column, value in enumerate(row):
                x = left + column * across
                step = "absent" if value is None or not math.isfinite(value) else f"level-{self.level(value)}"
                # Cells have gaps of 1.5 units and rounded corners.
                box = {"x": x + 0.75, "y": y + 0.75, "width": across - 1.5, "height": height - 1.5, "rx": 3}
                if self.heads and self.heads[layer][column]:
                    box["data_head"] = self.heads[layer][column]
                drawing.add("rect", f"cell {step}", f"layer {layer}, {tips[layer][column]}", **box)
                if value is not None:
                    drawing.text(x + across / 2, y + height / 2 + 4, texts[layer][column], f"value {step}", "middle")
        return drawing.svg()

    def level(self, value: Number) -> int:
        """Returns the colour step of a value; values outside the range are clipped."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        # The highest value would begin one more step.
        return min(LEVELS - 1, max(0, int(share * LEVELS)))


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
    drawing = Drawing(columns, rows, title)
    if address is None:
        drawing.add("use", "shown", href=f"#{shown}")
    else:
        box = {"width": columns, "height": rows, "preserveAspectRatio": "none"}
        drawing.add("image", "shown", id=shown, href=address, **box)
    # Outlines separate patches of different parts: merged groups, or kept and pruned patches.
    parts = left.long() if groups is None else groups
    if groups is not None:
        for group, fill in (fills or {}).items():
            drawing.add("path", "group", d=_runs(groups == group), fill=fill)
    elif not left.all():
        drawing.add("path", "veil", d=_runs(~left))
    if outline := _outline(parts.tolist()):
        drawing.add("path", "outline" if groups is None else "seam", d=outline)
    return drawing.svg()


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
