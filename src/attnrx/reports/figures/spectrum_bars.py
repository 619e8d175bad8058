"""The spectrum of one head: its directions by decreasing energy, kept or pruned, and the cumulative kept energy."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnrx.reports.figures.drawing import Drawing
from attnrx.reports.numbers import Number, percent

WIDTH, HEIGHT = 200.0, 84.0


@dataclass(frozen=True)
class SpectrumBars:
    """Energies (shares of the head) and the keep mask of the directions, in the same arbitrary order."""

    title: str
    energies: Sequence[Number]
    keep: Sequence[bool]

    def draw(self) -> str:
        """Returns the SVG picture; it contains no text, so it can be stretched to any width."""
        ranked = sorted(zip(self.energies, self.keep, strict=True), key=lambda pair: -pair[0])
        drawing = Drawing(WIDTH, HEIGHT, self.title, self._description())
        top = max((energy for energy, _ in ranked), default=0.0) or 1.0
        step = WIDTH / max(len(ranked), 1)
        for style, is_kept in (("kept", True), ("gone", False)):
            bars = [
                _bar(index * step, step, HEIGHT * energy / top)
                for index, (energy, keep) in enumerate(ranked)
                if keep == is_kept and energy > 0
            ]
            if bars:
                drawing.add("path", style, d="".join(bars))
        self._mark_cut(drawing, [keep for _, keep in ranked], step)
        self._draw_sum(drawing, ranked, step)
        return drawing.svg()

    @property
    def kept_energy(self) -> Number:
        """The kept share of the head's energy."""
        return sum(energy for energy, keep in zip(self.energies, self.keep, strict=True) if keep)

    def _mark_cut(self, drawing: Drawing, keep: list[bool], step: Number) -> None:
        rank = sum(keep)
        if 0 < rank < len(keep) and all(keep[:rank]):  # there is a single cut only if the strongest directions are kept
            drawing.add("line", "cut", x1=rank * step, x2=rank * step, y1=0, y2=HEIGHT)

    def _draw_sum(self, drawing: Drawing, ranked: list[tuple[Number, bool]], step: Number) -> None:
        total, points = 0.0, [f"M0 {HEIGHT:.2f}"]
        for index, (energy, keep) in enumerate(ranked):
            total += energy if keep else 0.0
            points.append(f"L{(index + 1) * step:.2f} {HEIGHT * (1 - total):.2f}")
        drawing.add("path", "sum", d="".join(points))

    def _description(self) -> str:
        return f"{sum(self.keep)} of {len(self.keep)} directions kept, with {percent(self.kept_energy)} of the energy."


def _bar(x: Number, step: Number, height: Number) -> str:
    gap = step * 0.16
    return f"M{x + gap:.2f} {HEIGHT:.2f}v{-height:.2f}h{step - 2 * gap:.2f}v{height:.2f}z"
