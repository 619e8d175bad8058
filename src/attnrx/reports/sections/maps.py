"""Maps of layers and heads: the readings of each head."""

import math
from collections.abc import Sequence

from attnrx.diagnosis import Diagnosis
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import LEVELS, HeatMap
from attnrx.reports.numbers import MISSING, fixed, number, short
from attnrx.reports.sections.section import Figure, Section

# Captions of the readings, in the order of the page; other readings follow.
MEANING = {
    "effective_rank": "The effective number of directions by the entropy of the energy (Eq. 24).",
    "selectivity": "0 where attention is uniform, 1 where every query attends to one token.",
    "entropy": "Spectral entropy in nats (Eq. 23).",
    "sparsity": "Share of directions below a tenth of the head's largest strength (Eq. 29: an absolute threshold).",
    "alignment": "Mean cosine between queries and keys, before the strengths.",
    "sensitivity": "Largest strength times the scale: the bound on the change of a score (Proposition 4).",
    "perturbation_response": "Change of the attention map under a small change of the image (Eq. 33).",
}
MAIN = ("effective_rank", "selectivity")
DENSE = 9  # from this many heads on the cells are small and show fewer digits

Rows = Sequence[Sequence[float | None]]


def maps(content: ReportContent) -> Section | None:
    """Returns effective rank and selectivity as open figures, and the other readings as folded ones."""
    if content.diagnosis is None:
        return None
    names = [layer.spectrum.heads for layer in content.diagnosis.layers]
    most = max((layer.spectrum.strength.shape[1] for layer in content.diagnosis.layers), default=1)
    readings = _readings(content.diagnosis)
    figures = {name: _reading(name, _placed(rows, names), most) for name, rows in readings.items()}
    if not figures:
        return None
    main = [figures.pop(name) for name in MAIN if name in figures]
    dense = any(max(heads, default=0) >= DENSE - 1 for heads in names)
    data = {"main": main, "rest": list(figures.values()), "steps": range(LEVELS), "dense": dense}
    return Section("maps", "Layers and heads", data)


def _readings(diagnosis: Diagnosis) -> dict[str, Rows]:
    """Returns the readings with one number per head that all layers have, those of MEANING first."""
    shared = [
        {name for name, reading in layer.readings.items() if tuple(reading.shape) == (len(layer.spectrum.heads),)}
        for layer in diagnosis.layers
    ]
    names = set.intersection(*shared) if shared else set()
    ordered = [name for name in MEANING if name in names] + sorted(names - MEANING.keys())
    return {name: [layer.readings[name].tolist() for layer in diagnosis.layers] for name in ordered}


def _reading(name: str, grid: Rows, most: int) -> Figure:
    values = [value for row in grid for value in row if value is not None and math.isfinite(value)] or [0.0]
    dense = len(grid[0]) >= DENSE
    limits = {"effective_rank": (0.0, float(most)), "selectivity": (0.0, 1.0), "sparsity": (0.0, 1.0)}
    low, high = limits.get(name, (min(values), max(values)))
    largest = max(abs(low), abs(high))
    # Cells have space for three digits: very small or large values are shown in units of a power of ten.
    power = 0 if largest == 0 or 0.01 <= largest < 1000 else math.floor(math.log10(largest))
    decimals = max(0, (2 if dense else 3) - (1 if largest / 10**power < 2 else 2))
    decimals = 1 if name == "effective_rank" else max(decimals, 2 if largest <= 1 else 0)
    return _figure(name.replace("_", " ").capitalize(), grid, (low, high), (decimals, power), MEANING.get(name, ""))


def _figure(title: str, grid: Rows, limits: tuple[float, float], digits: tuple[int, int], caption: str) -> Figure:
    """Draws a map; `digits` are the decimals in the cells and the power of ten of their unit."""
    decimals, power = digits
    heat_map = HeatMap(
        f"{title} of every head",
        grid,
        *limits,
        write=lambda value: fixed(value / 10**power, decimals) if math.isfinite(value) else MISSING,
        dense=len(grid[0]) >= DENSE,
    )
    unit = f", cells in units of {number(10.0**power, 1)}" if power else ""
    return Figure(heat_map.draw(), title, f"{short(limits[0], 3)} to {short(limits[1], 3)}{unit}", caption)


def _placed(rows: Rows, names: list[tuple[int, ...]]) -> Rows:
    """Arranges the values by the original index of their head; columns without a head are empty."""
    columns = 1 + max((head for heads in names for head in heads), default=0)
    grid: list[list[float | None]] = [[None] * columns for _ in rows]
    for line, row, heads in zip(grid, rows, names, strict=True):
        for head, value in zip(heads, row, strict=True):
            line[head] = value
    return grid
