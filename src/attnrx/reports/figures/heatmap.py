"""A heat map of layers and heads with the values in the cells."""

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
    """Rows are layers, columns are heads of the original model unless `columns` names them; None for a pruned head.

    A row with a single value is one cell across all columns, for a shared quantity. The cells show the values, or
    `texts`; `tips` are their tooltips, also used for screen readers.
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
        """Returns the SVG picture."""
        columns = max(len(self.columns), *(len(row) for row in self.values))
        width, height, left, top = (33, 26, 60, 22) if self.dense else (46, 32, 60, 22)
        drawing = Drawing(left + columns * width, top + len(self.values) * height, self.title, self._description())
        for column in range(columns):
            name = str(column) if self.dense and not self.columns else self._column(column)
            drawing.text(left + (column + 0.5) * width, top - 8, name, "label", "middle")
        for layer, row in enumerate(self.values):
            middle = top + (layer + 0.5) * height
            drawing.text(left - 8, middle + 4, f"layer {layer}", "label", "end")
            cell_width = width * columns if len(row) == 1 else width
            for column in range(len(row)):
                corner = (left + column * cell_width, top + layer * height)
                self._cell(drawing, corner, (cell_width, height), (layer, column))
        return drawing.svg()

    def level(self, value: Number) -> int:
        """Returns the colour step of a value; values outside the range are clipped."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return min(LEVELS - 1, max(0, int(share * LEVELS)))

    def _cell(
        self, drawing: Drawing, corner: tuple[Number, Number], size: tuple[Number, Number], cell: tuple[int, int]
    ) -> None:
        (x, y), (width, height), (layer, column) = corner, size, cell
        value = self.values[layer][column]
        step = "absent" if value is None or not math.isfinite(value) else f"level-{self.level(value)}"
        box = {"x": x + 0.75, "y": y + 0.75, "width": width - 1.5, "height": height - 1.5, "rx": 3}
        drawing.add("rect", f"cell {step}", f"layer {layer}, {self._tip(layer, column)}", **box)
        if value is not None:
            drawing.text(x + width / 2, y + height / 2 + 4, self._text(layer, column), f"value {step}", "middle")

    def _column(self, column: int) -> str:
        return self.columns[column] if self.columns else f"head {column}"

    def _text(self, layer: int, column: int) -> str:
        value = self.values[layer][column]
        if self.texts is not None:
            return self.texts[layer][column]
        return "removed" if value is None else self.write(value)

    def _tip(self, layer: int, column: int) -> str:
        if self.tips is not None:
            return self.tips[layer][column]
        return f"{self._column(column)}: {self._text(layer, column)}"

    def _description(self) -> str:
        text_of = self._tip if self.tips is not None else self._text
        rows = (
            f"layer {layer}: " + ", ".join(text_of(layer, column) for column in range(len(row)))
            for layer, row in enumerate(self.values)
        )
        return "; ".join(rows) + "."
