"""Maps of layers and heads: what was measured in each head, and the rank that each one keeps."""

import math
from collections.abc import Sequence

from attnrx.diagnosis import Diagnosis
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import LEVELS, HeatMap
from attnrx.reports.numbers import number
from attnrx.reports.sections.section import Figure, Section
from attnrx.reports.sections.treatment import original_heads

# What the readings mean to a reader, in the order in which they are shown. A reading that is not listed here is shown after these.
MEANING = {
    "effective_rank": "How many directions the energy is spread over (Eq. 24).",
    "selectivity": "0 where attention is uniform, 1 where every query attends to one token.",
    "entropy": "Spectral entropy in nats (Eq. 23).",
    "sparsity": "Share of directions whose strength is below the threshold (Eq. 29).",
    "alignment": "Mean cosine between queries and keys, before the strengths.",
    "sensitivity": "Largest strength times the scale: how far a score can move (Proposition 4).",
    "perturbation_response": "Change of the attention map under a small change of the image (Eq. 33).",
}
MAIN = ("effective_rank", "selectivity")


def maps(content: ReportContent) -> Section | None:
    """Gives effective rank, kept rank and selectivity at once, and the other readings on request."""
    names = original_heads(content)
    readings = {} if content.diagnosis is None else _readings(content.diagnosis)
    main = [_map(name, readings[name], names, _most(content)) for name in MAIN if name in readings]
    kept = _kept(content, names)
    if kept is not None:
        main.insert(1 if "effective_rank" in readings else 0, kept)
    rest = [_map(name, table, names, _most(content)) for name, table in readings.items() if name not in MAIN]
    if not main and not rest:
        return None
    return Section("maps", "Layers and heads", {"main": main, "rest": rest, "steps": range(LEVELS)})


def _readings(diagnosis: Diagnosis) -> dict[str, list[list[float]]]:
    """Gives the readings with one number per head that every layer has, known ones first."""
    shared = [
        {name for name, reading in layer.readings.items() if reading.ndim == 1 and len(reading) == len(layer.spectrum.heads)}
        for layer in diagnosis.layers
    ]
    names = set.intersection(*shared) if shared else set()
    ordered = [name for name in MEANING if name in names] + sorted(names - MEANING.keys())
    return {name: [layer.readings[name].tolist() for layer in diagnosis.layers] for name in ordered}


def _most(content: ReportContent) -> int:
    """The directions of a full head, the common end of both rank scales."""
    if content.prescription is not None:
        return max((layer.keep.shape[1] for layer in content.prescription.layers), default=1)
    layers = content.diagnosis.layers if content.diagnosis is not None else ()
    return max((layer.spectrum.strength.shape[1] for layer in layers), default=1)


def _kept(content: ReportContent, names: list[tuple[int, ...]]) -> Figure | None:
    if content.prescription is None:
        return None
    rows = [
        [float(rank) if stays else None for rank, stays in zip(layer.ranks, layer.heads.tolist(), strict=True)]
        for layer in content.prescription.layers
    ]
    grid = _placed(rows, names)
    picture = HeatMap("Kept rank of every head", grid, 0, _most(content), lambda value: f"{value:.0f}").draw()
    return Figure(picture, "Kept rank", f"0 to {_most(content)}", "How many directions the prescription leaves each head.")


def _map(name: str, rows: list[list[float]], names: list[tuple[int, ...]], most: int) -> Figure:
    low, high = _limits(name, rows, most)
    title = name.replace("_", " ").capitalize()
    picture = HeatMap(f"{title} of every head", _placed(rows, names), low, high, _writer(high)).draw()
    return Figure(picture, title, f"{number(low)} to {number(high)}", MEANING.get(name, ""))


def _limits(name: str, rows: list[list[float]], most: int) -> tuple[float, float]:
    if name == "effective_rank":
        return 0.0, float(most)
    if name in ("selectivity", "sparsity"):
        return 0.0, 1.0
    values = [value for row in rows for value in row if math.isfinite(value)] or [0.0]
    return min(values), max(values)


def _writer(high: float):
    if high >= 10:
        return lambda value: f"{value:.1f}"
    return lambda value: number(value, 2)


def _placed(rows: Sequence[Sequence[float | None]], names: list[tuple[int, ...]]) -> list[list[float | None]]:
    """Puts every value into the column of its original head; columns without a head stay empty."""
    columns = 1 + max((head for heads in names for head in heads), default=0)
    grid: list[list[float | None]] = [[None] * columns for _ in rows]
    for line, row, heads in zip(grid, rows, names, strict=True):
        for head, value in zip(heads, row, strict=True):
            line[head] = value
    return grid
