"""A value with its interval and draws on an axis shared by several rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnrx.reports.figures.drawing import AxisScale, Drawing
from attnrx.reports.numbers import Number, number

WIDTH, HEIGHT, MARGIN = 300.0, 26.0, 14.0


@dataclass(frozen=True)
class IntervalRow:
    """One row: the value as a dot, its interval as a bar, single draws as faint strokes, a limit as a tall stroke."""

    title: str
    value: Number
    low: Number | None = None
    high: Number | None = None
    draws: Sequence[Number] = ()
    limit: Number | None = None

    def values(self) -> list[Number]:
        """Returns all values that the common axis must include."""
        return [v for v in (self.value, self.low, self.high, self.limit, *self.draws) if v is not None]

    def draw(self, axis: tuple[Number, Number]) -> str:
        """Returns the SVG picture on an axis with these ends."""
        drawing = Drawing(WIDTH, HEIGHT, self.title)
        x = AxisScale(*axis, MARGIN, WIDTH - MARGIN)
        middle = HEIGHT / 2
        if axis[0] < 0 < axis[1]:
            drawing.add("line", "zero", x1=x(0), x2=x(0), y1=0, y2=HEIGHT)
        drawing.add("line", "grid", x1=MARGIN, x2=WIDTH - MARGIN, y1=middle, y2=middle)
        for value in self.draws:
            drawing.add("line", "draw", number(value), x1=x(value), x2=x(value), y1=middle - 8, y2=middle + 8)
        if self.limit is not None:
            tip = f"limit {number(self.limit)}"
            drawing.add("line", "cut", tip, x1=x(self.limit), x2=x(self.limit), y1=1, y2=HEIGHT - 1)
        if self.low is not None and self.high is not None:
            tip = f"{number(self.low)} to {number(self.high)}"
            drawing.add("line", "whisker style-0", tip, x1=x(self.low), x2=x(self.high), y1=middle, y2=middle)
        drawing.add("circle", "marker style-0", number(self.value), cx=x(self.value), cy=middle, r=4.5)
        return drawing.svg()


def axis_picture(axis: tuple[Number, Number], title: str) -> str:
    """Returns the picture of the axis below the rows."""
    drawing = Drawing(WIDTH, 24, title)
    x = AxisScale(*axis, MARGIN, WIDTH - MARGIN)
    drawing.add("line", "axis", x1=MARGIN, x2=WIDTH - MARGIN, y1=1, y2=1)
    for tick, words in x.labels():
        drawing.add("line", "tick", x1=x(tick), x2=x(tick), y1=1, y2=5)
        drawing.text(x(tick), 18, words, "label", "middle")
    return drawing.svg()
