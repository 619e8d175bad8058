"""An image whose patches leave: the picture is stored once, and every stage covers what has left."""

from dataclasses import dataclass

from attnrx.reports.figures.drawing import Drawing
from attnrx.shapes import Bool, Tensor

SIDE = 224.0  # the longer side, in the picture's own units


@dataclass(frozen=True)
class PatchPicture:
    """The image with the name `shown`, its patches row by row in a grid; `left` says which are still there.

    The first picture of an image holds it as `address`; the others show the same by its name, so a page holds it once.
    """

    title: str
    shown: str
    left: Bool[Tensor, "rows columns"]
    address: str | None = None

    def draw(self) -> str:
        """Returns the picture."""
        rows, columns = self.left.shape
        step = SIDE / max(rows, columns)
        width, height = columns * step, rows * step
        drawing = Drawing(width, height, self.title)
        if self.address is None:
            drawing.add("use", "shown", href=f"#{self.shown}")
        else:
            box = {"width": width, "height": height, "preserveAspectRatio": "none"}
            drawing.add("image", "shown", id=self.shown, href=self.address, **box)
        there = self.left.tolist()
        if not self.left.all():
            gone = [_square(row, column, step) for row, column in _places(there, False)]
            drawing.add("path", "veil", d="".join(gone))
            drawing.add("path", "outline", d=_outline(there, step))
        return drawing.svg()


def _places(there: list[list[bool]], wanted: bool) -> list[tuple[int, int]]:
    return [
        (row, column) for row, line in enumerate(there) for column, is_there in enumerate(line) if is_there == wanted
    ]


def _square(row: int, column: int, step: float) -> str:
    return f"M{column * step:.2f} {row * step:.2f}h{step:.2f}v{step:.2f}h{-step:.2f}z"


def _outline(there: list[list[bool]], step: float) -> str:
    """Returns the edges between patches that are there and those that have left."""
    edges = []
    for row, column in _places(there, True):
        x, y = column * step, row * step
        if row and not there[row - 1][column]:
            edges.append(f"M{x:.2f} {y:.2f}h{step:.2f}")
        if row + 1 < len(there) and not there[row + 1][column]:
            edges.append(f"M{x:.2f} {y + step:.2f}h{step:.2f}")
        if column and not there[row][column - 1]:
            edges.append(f"M{x:.2f} {y:.2f}v{step:.2f}")
        if column + 1 < len(there[row]) and not there[row][column + 1]:
            edges.append(f"M{x + step:.2f} {y:.2f}v{step:.2f}")
    return "".join(edges)
