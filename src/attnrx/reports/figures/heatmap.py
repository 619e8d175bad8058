"""A map of layers and heads: one cell each, coloured by its value, with the value written in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnrx.reports.figures.drawing import Drawing
from attnrx.reports.numbers import Number, number

LEVELS = 9  # steps of the sequential colour scale, .level-0 to .level-8 in the style sheet

Grid = Sequence[Sequence[Number | None]]


@dataclass(frozen=True)
class HeatMap:
    """Rows are layers, columns are heads of the original model; None where a head no longer exists."""

    title: str
    values: Grid
    low: Number
    high: Number
    write: Callable[[Number], str] = number
    dense: bool = False  # smaller cells, for many heads

    def draw(self) -> str:
        """Gives the picture."""
        columns = max(len(row) for row in self.values)
        width, height, left, top = (33, 26, 54, 22) if self.dense else (46, 32, 54, 22)
        drawing = Drawing(left + columns * width, top + len(self.values) * height, self.title, self._in_words())
        for head in range(columns):
            name = str(head) if self.dense else f"head {head}"
            drawing.text(left + (head + 0.5) * width, top - 8, name, "label", "middle")
        for layer, row in enumerate(self.values):
            middle = top + (layer + 0.5) * height
            drawing.text(left - 8, middle + 4, f"layer {layer}", "label", "end")
            for head, value in enumerate(row):
                corner = (left + head * width, top + layer * height)
                self._cell(drawing, corner, (width, height), (layer, head, value))
        return drawing.svg()

    def level(self, value: Number) -> int:
        """Gives the colour step of a value; values outside the range take the nearest end."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return min(LEVELS - 1, max(0, int(share * LEVELS)))

    def _cell(self, drawing: Drawing, corner: tuple[Number, Number], size: tuple[Number, Number], cell: tuple) -> None:
        (x, y), (width, height), (layer, head, value) = corner, size, cell
        words = "removed" if value is None else self.write(value)
        step = "absent" if value is None or not math.isfinite(value) else f"level-{self.level(value)}"
        tip = f"layer {layer}, head {head}: {words}"
        box = {"x": x + 0.75, "y": y + 0.75, "width": width - 1.5, "height": height - 1.5, "rx": 3}
        drawing.add("rect", f"cell {step}", tip, **box)
        if value is not None:
            drawing.text(x + width / 2, y + height / 2 + 4, words, f"value {step}", "middle")

    def _in_words(self) -> str:
        rows = (
            f"layer {layer}: " + ", ".join("removed" if v is None else self.write(v) for v in row)
            for layer, row in enumerate(self.values)
        )
        return "; ".join(rows) + "."
