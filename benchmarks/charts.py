"""Draws SVG charts of curves with their intervals over two axes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from attnrx.show.reports.numbers import NOTHING, Number, fixed, number, short

STYLES = 6  # colours of curves, .style-0 to .style-5 in the style sheet

# Sizes are in SVG user units. The HTML page scales each picture.
WIDTH, HEIGHT = 360.0, 230.0  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 54.0, 350.0, 26.0, 190.0  # the ends of the chart's axes

# SVG paths of the markers, one per position in the legend, so curves also differ without colour. All paths are centred
# on the origin.
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.6L4.4 3.4H-4.4z",
    "M0 -5L5 0L0 5L-5 0z",
    "M0 4.6L4.4 -3.4H-4.4z",
    "M-4.5 -1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",
)


class Drawing:
    """An SVG picture under construction. Its colours come from the classes of the page's style sheet."""

    def __init__(self, width: Number, height: Number, title: str, description: str = ""):
        box = f"0 0 {_coordinate(width)} {_coordinate(height)}"
        size = {"width": _coordinate(width), "height": _coordinate(height)}
        # ElementTree escapes texts and attributes, because names of models and classes may contain markup. The label
        # and the description are for screen readers.
        self._root = ElementTree.Element("svg", {"viewBox": box, "role": "img", "aria-label": title, **size})
        if description:
            ElementTree.SubElement(self._root, "desc").text = description

    def add(self, shape: str, style: str, tip: str = "", **attributes: Number | str) -> None:
        """Adds one shape with the CSS classes `style` and the tooltip `tip`."""
        # Keyword arguments cannot contain the hyphens of SVG attribute names, so underscores stand for them.
        written = {name.replace("_", "-"): _coordinate(value) for name, value in attributes.items()}
        element = ElementTree.SubElement(self._root, shape, {"class": style, **written})
        if tip:
            ElementTree.SubElement(element, "title").text = tip

    def text(self, x: Number, y: Number, words: str, style: str = "label", anchor: str = "start") -> None:
        """Adds text whose baseline starts, ends or is centred at a point."""
        attributes = {"x": _coordinate(x), "y": _coordinate(y), "text-anchor": anchor, "class": style}
        ElementTree.SubElement(self._root, "text", attributes).text = words

    def svg(self) -> str:
        """Returns the finished picture as markup for an HTML page."""
        # "unicode" omits the XML declaration, which is not allowed inside HTML.
        return ElementTree.tostring(self._root, encoding="unicode")


def _coordinate(value: Number | str) -> str:
    # Two decimals are a hundredth of a pixel. More decimals would only make the page larger.
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class AxisScale:
    """Maps `low`..`high` to `start`..`stop` linearly. `high` must exceed `low`."""

    low: Number
    high: Number
    start: Number
    stop: Number

    def __call__(self, value: Number) -> Number:
        return self.start + (self.stop - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self, count: int = 4) -> list[Number]:
        """Returns about `count` round values within the range."""
        rough = (self.high - self.low) / max(count, 1)
        power = 10.0 ** math.floor(math.log10(rough))
        # A tolerance is needed, because ranges such as 0.1 to 0.7 are not exact in binary.
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]

    @property
    def power(self) -> int:
        """The power of ten by which the labels are divided. It is 0 unless plain labels would be too long."""
        largest = max(abs(self.low), abs(self.high))
        if 1e-3 <= largest < 1e5 or largest == 0:
            return 0
        return math.floor(math.log10(largest))

    def labels(self, count: int = 4) -> list[tuple[Number, str]]:
        """Returns the ticks with their labels in units of `power`, all with the same number of decimals."""
        ticks = self.ticks(count)
        if self.power or len(ticks) < 2:
            unit = 10.0**self.power
            return [(tick, short(tick / unit, 3)) for tick in ticks]
        step = ticks[1] - ticks[0]
        decimals = next((digits for digits in range(6) if abs(round(step, digits) - step) < step * 1e-6), 6)
        return [(tick, fixed(tick, decimals)) for tick in ticks]


def span(values: Iterable[Number], *, include: Iterable[Number] = (), room: Number = 0.06) -> tuple[Number, Number]:
    """Returns a range around all values. The margin on each side is `room` times their spread, and never zero."""
    everything = [value for value in (*values, *include) if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(everything), max(everything)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):  # equal up to rounding
        margin = abs(low) * 0.1 if abs(low) > NOTHING else 1.0
        return low - margin, high + margin
    margin = (high - low) * room
    return low - margin, high + margin


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
    """A named series of points, ordered by x. Its position `index` in the legend selects its colour and marker."""

    name: str
    points: tuple[CurvePoint, ...]
    index: int

    @property
    def style(self) -> str:
        """The CSS class of the colour."""
        return f"style-{self.index % STYLES}"

    @property
    def marker(self) -> str:
        """The path of the marker. After STYLES curves the colours repeat, with other markers."""
        return MARKERS[(self.index + self.index // STYLES) % len(MARKERS)]


@dataclass(frozen=True)
class Chart:
    """A chart of curves on common axes, with their intervals as shaded areas. `level` adds a horizontal line."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    level: Number | None = None

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """A small picture of every curve's line and marker, with the curve's name."""
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
        for curve in self.curves:  # all bands come first, so that they lie below the lines
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
    if len(bounded) == 1:  # the band of a single point would have no area
        middle, low, high = (axis(value) for axis, value in zip((x, y, y), bounded[0], strict=True))
        stroke = f"M{middle - 3:.2f} {low:.2f}h6m-3 0V{high:.2f}m-3 0h6"
        drawing.add("path", f"whisker {curve.style}", d=stroke)
    if len(bounded) > 1:
        upper = [(x(point_x), y(high)) for point_x, _, high in bounded]
        lower = [(x(point_x), y(low)) for point_x, low, _ in reversed(bounded)]
        drawing.add("path", f"band {curve.style}", d=_polyline([*upper, *lower]) + "z")


def _polyline(points: list[tuple[Number, Number]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)
