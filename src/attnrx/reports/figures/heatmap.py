"""A map of layers and heads: one cell each, coloured by its value, with the value written in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnrx.reports.figures.drawing import Drawing
from attnrx.reports.numbers import Number, number

LEVELS = 9  # steps of the sequential colour scale, .level-0 to .level-8 in the style sheet

Grid = Sequence[Sequence[Number | None]]
Words = Sequence[Sequence[str]]


@dataclass(frozen=True)
class HeatMap:
    """Rows are layers, columns heads of the original model, unless `columns` names them; None where one is gone.

    A row of a single value is one cell across all columns, for what they have in common. The cells show the values;
    `texts` are other words in them, and `tips` their tooltips, which screen readers read too.
    """

    title: str
    values: Grid
    low: Number
    high: Number
    write: Callable[[Number], str] = number
    dense: bool = False  # smaller cells, for many columns
    columns: tuple[str, ...] = ()
    texts: Words | None = None
    tips: Words | None = None

    def draw(self) -> str:
        """Returns the picture."""
        columns = max(len(self.columns), *(len(row) for row in self.values))
        width, height, left, top = (33, 26, 60, 22) if self.dense else (46, 32, 60, 22)
        drawing = Drawing(left + columns * width, top + len(self.values) * height, self.title, self._in_words())
        for place in range(columns):
            name = str(place) if self.dense and not self.columns else self._column(place)
            drawing.text(left + (place + 0.5) * width, top - 8, name, "label", "middle")
        for layer, row in enumerate(self.values):
            middle = top + (layer + 0.5) * height
            drawing.text(left - 8, middle + 4, f"layer {layer}", "label", "end")
            wide = width * columns if len(row) == 1 else width
            for place in range(len(row)):
                corner = (left + place * wide, top + layer * height)
                self._cell(drawing, corner, (wide, height), (layer, place))
        return drawing.svg()

    def level(self, value: Number) -> int:
        """Returns the colour step of a value; values outside the range take the nearest end."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return min(LEVELS - 1, max(0, int(share * LEVELS)))

    def _cell(
        self, drawing: Drawing, corner: tuple[Number, Number], size: tuple[Number, Number], cell: tuple[int, int]
    ) -> None:
        (x, y), (width, height), (layer, place) = corner, size, cell
        value = self.values[layer][place]
        step = "absent" if value is None or not math.isfinite(value) else f"level-{self.level(value)}"
        box = {"x": x + 0.75, "y": y + 0.75, "width": width - 1.5, "height": height - 1.5, "rx": 3}
        drawing.add("rect", f"cell {step}", f"layer {layer}, {self._tip(layer, place)}", **box)
        if value is not None:
            drawing.text(x + width / 2, y + height / 2 + 4, self._text(layer, place), f"value {step}", "middle")

    def _column(self, place: int) -> str:
        return self.columns[place] if self.columns else f"head {place}"

    def _text(self, layer: int, place: int) -> str:
        value = self.values[layer][place]
        if self.texts is not None:
            return self.texts[layer][place]
        return "removed" if value is None else self.write(value)

    def _tip(self, layer: int, place: int) -> str:
        if self.tips is not None:
            return self.tips[layer][place]
        return f"{self._column(place)}: {self._text(layer, place)}"

    def _in_words(self) -> str:
        text_of = self._tip if self.tips is not None else self._text
        rows = (
            f"layer {layer}: " + ", ".join(text_of(layer, place) for place in range(len(row)))
            for layer, row in enumerate(self.values)
        )
        return "; ".join(rows) + "."
