"""An image with pruned patches: the picture is stored once, and every stage covers the pruned patches."""

from dataclasses import dataclass

from attnrx.reports.figures.drawing import Drawing
from attnrx.shapes import Bool, Tensor

SIDE = 224.0  # the longer side, in the picture's own units


@dataclass(frozen=True)
class PatchPicture:
    """The image with the id `shown`, its patches row by row in a grid; `left` marks the kept patches.

    The first picture of an image contains it as the data URI `address`; the others refer to its id.
    """

    title: str
    shown: str
    left: Bool[Tensor, "rows columns"]
    address: str | None = None

    def draw(self) -> str:
        """Returns the SVG picture."""
        rows, columns = self.left.shape
        step = SIDE / max(rows, columns)
        width, height = columns * step, rows * step
        drawing = Drawing(width, height, self.title)
        if self.address is None:
            drawing.add("use", "shown", href=f"#{self.shown}")
        else:
            box = {"width": width, "height": height, "preserveAspectRatio": "none"}
            drawing.add("image", "shown", id=self.shown, href=self.address, **box)
        is_kept = self.left.tolist()
        if not self.left.all():
            pruned = [_square(row, column, step) for row, column in _cells(is_kept, False)]
            drawing.add("path", "veil", d="".join(pruned))
            drawing.add("path", "outline", d=_outline(is_kept, step))
        return drawing.svg()


def _cells(mask: list[list[bool]], value: bool) -> list[tuple[int, int]]:
    return [(row, column) for row, line in enumerate(mask) for column, cell in enumerate(line) if cell == value]


def _square(row: int, column: int, step: float) -> str:
    return f"M{column * step:.2f} {row * step:.2f}h{step:.2f}v{step:.2f}h{-step:.2f}z"


def _outline(is_kept: list[list[bool]], step: float) -> str:
    """Returns the edges between kept and pruned patches."""
    edges = []
    for row, column in _cells(is_kept, True):
        x, y = column * step, row * step
        if row and not is_kept[row - 1][column]:
            edges.append(f"M{x:.2f} {y:.2f}h{step:.2f}")
        if row + 1 < len(is_kept) and not is_kept[row + 1][column]:
            edges.append(f"M{x:.2f} {y + step:.2f}h{step:.2f}")
        if column and not is_kept[row][column - 1]:
            edges.append(f"M{x:.2f} {y:.2f}v{step:.2f}")
        if column + 1 < len(is_kept[row]) and not is_kept[row][column + 1]:
            edges.append(f"M{x + step:.2f} {y:.2f}v{step:.2f}")
    return "".join(edges)
