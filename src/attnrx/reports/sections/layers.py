"""Layers and heads: the prescription with its reasons, the kept ranks, the readings and the spectra of every head."""

import math
from collections.abc import Sequence

from attnrx.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.prescription import ScoreDecision
from attnrx.reports.content import ReportContent
from attnrx.reports.figures import LEVELS, HeatMap, spectrum_bars
from attnrx.reports.numbers import MISSING, fixed, number, percent, plain, short
from attnrx.reports.ranks import HeadRank, PathwayRanks, prescribed_ranks
from attnrx.reports.sections.section import Figure, Section

DENSE = 9  # from this many columns on the cells of heat maps are small and show fewer digits
OPEN_PANELS = 32  # with more panels of spectra only the first layer is unfolded initially

PATHWAYS = {
    "Query and key": "Directions in which a head scores pairs of tokens.",
    "Value and output": "Value dimensions of a head.",
    "MLP": "Ranks of the two maps; a map that is not factorized is marked “all”.",
}
SHARED = "A cell across a layer is the number of directions shared by all its heads."

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

Rows = Sequence[Sequence[float | None]]


def treatment(content: ReportContent) -> Section | None:
    """Returns the prescription: the rules, and one reason per head."""
    prescription = content.prescription
    if prescription is None:
        return None
    if content.diagnosis is None:
        heads = [tuple(range(len(layer.heads))) for layer in prescription.layers]
    else:
        heads = [layer.spectrum.heads for layer in content.diagnosis.layers]
    layers = []
    for layer, names in zip(prescription.layers, heads, strict=True):
        scores = layer.qk
        keeps = f"heads keep {plain(list(scores.ranks), 16)} of {scores.keep.shape[1]}"
        if scores.is_shared:
            keeps = f"the heads share {number(scores.kept)} of {number(scores.directions)}"
        data = {
            "heads": list(zip(names, scores.ranks, layer.heads.tolist(), scores.reasons, strict=True)),
            "removed": percent(1 - scores.kept / scores.directions if scores.directions else None),
            "keeps": keeps,
            "others": [(name, why) for name, own in layer.decisions.items() if name != "qk" for why in own.reasons],
        }
        layers.append(data)
    return Section("prescription", "Prescription", {"prescription": prescription, "layers": layers})


def ranks(content: ReportContent) -> Section | None:
    """Returns one heat map per pathway, coloured from rank zero to full rank, and the numbers as tables."""
    found = content.ranks
    if not found and content.prescription is not None:
        found = prescribed_ranks(content.prescription, content.diagnosis)
    if not found:
        return None
    words = [[[_words(part) for part in layer] for layer in pathway.layers] for pathway in found]
    data = {
        "figures": [_rank_figure(pathway, texts) for pathway, texts in zip(found, words, strict=True)],
        "tables": list(zip(found, words, strict=True)),
        "steps": range(LEVELS),
        "dense": any(len(pathway.columns) >= DENSE for pathway in found),
    }
    return Section("ranks", "Ranks", data)


def _words(part: HeadRank) -> str:
    if part.rank is None:
        return "removed"
    return f"all {number(part.full)}, one matrix" if part.whole else f"{number(part.rank)} of {number(part.full)}"


def _rank_figure(pathway: PathwayRanks, words: list[list[str]]) -> Figure:
    """Draws one pathway; `words` describe the parts of every layer."""
    several, caption = len(pathway.columns) > 1, PATHWAYS.get(pathway.name, "")
    shared = [several and len(layer) == 1 for layer in pathway.layers]
    cells = [["all" if part.whole else number(part.rank) for part in layer] for layer in pathway.layers]
    tips = []
    for is_shared, row in zip(shared, words, strict=True):
        names = ("all heads together",) if is_shared else pathway.columns
        tips.append([f"{name}: {text}" for name, text in zip(names, row, strict=True)])
    picture = HeatMap(
        f"{pathway.name}: rank of every part, from zero to full",
        [[None if part.rank is None else part.share for part in layer] for layer in pathway.layers],
        0.0,
        1.0,
        dense=len(pathway.columns) >= DENSE,
        columns=pathway.columns,
        texts=cells,
        tips=tips,
    )
    share = percent(pathway.kept / max(pathway.full, 1))
    note = f"{number(pathway.kept)} of {number(pathway.full)} kept, {share}"
    return Figure(picture.draw(), pathway.name, note, f"{caption} {SHARED}".strip() if any(shared) else caption)


def maps(content: ReportContent) -> Section | None:
    """Returns effective rank and selectivity as open figures, and the other readings as folded ones."""
    if content.diagnosis is None:
        return None
    figures = _reading_figures(content.diagnosis)
    if not figures:
        return None
    main = [figures.pop(name) for name in MAIN if name in figures]
    dense = any(max(layer.spectrum.heads, default=0) >= DENSE - 1 for layer in content.diagnosis.layers)
    data = {"main": main, "rest": list(figures.values()), "steps": range(LEVELS), "dense": dense}
    return Section("maps", "Layers and heads", data)


def _reading_figures(diagnosis: Diagnosis) -> dict[str, Figure]:
    """Draws the readings with one number per head that all layers have, those of MEANING first."""
    layers = diagnosis.layers
    shared = [
        {name for name, reading in layer.readings.items() if tuple(reading.shape) == (len(layer.spectrum.heads),)}
        for layer in layers
    ]
    names = set.intersection(*shared) if shared else set()
    most = max((layer.spectrum.strength.shape[1] for layer in layers), default=1)
    columns = 1 + max((head for layer in layers for head in layer.spectrum.heads), default=0)
    figures = {}
    for name in [name for name in MEANING if name in names] + sorted(names - MEANING.keys()):
        # Heads are at their index in the original model; columns without a head stay empty.
        grid: list[list[float | None]] = [[None] * columns for _ in layers]
        for row, layer in zip(grid, layers, strict=True):
            for head, value in zip(layer.spectrum.heads, layer.readings[name].tolist(), strict=True):
                row[head] = value
        figures[name] = _reading_figure(name, grid, most)
    return figures


def _reading_figure(name: str, grid: Rows, most: int) -> Figure:
    values = [value for row in grid for value in row if value is not None and math.isfinite(value)] or [0.0]
    dense = len(grid[0]) >= DENSE
    limits = {"effective_rank": (0.0, float(most)), "selectivity": (0.0, 1.0), "sparsity": (0.0, 1.0)}
    low, high = limits.get(name, (min(values), max(values)))
    largest = max(abs(low), abs(high))
    # Cells have space for three digits: very small or large values are shown in units of a power of ten.
    power = 0 if largest == 0 or 0.01 <= largest < 1000 else math.floor(math.log10(largest))
    decimals = max(0, (2 if dense else 3) - (1 if largest / 10**power < 2 else 2))
    decimals = 1 if name == "effective_rank" else max(decimals, 2 if largest <= 1 else 0)

    def write(value: float) -> str:
        return fixed(value / 10**power, decimals) if math.isfinite(value) else MISSING

    title = name.replace("_", " ").capitalize()
    picture = HeatMap(f"{title} of every head", grid, low, high, write, dense).draw()
    unit = f", cells in units of {number(10.0**power, 1)}" if power else ""
    return Figure(picture, title, f"{short(low, 3)} to {short(high, 3)}{unit}", MEANING.get(name, ""))


def spectra(content: ReportContent) -> Section | None:
    """Returns one panel per head, grouped by layer: the directions by decreasing energy, and the cut if prescribed."""
    if content.diagnosis is None:
        return None
    diagnosed, prescription = content.diagnosis.layers, content.prescription
    prescribed = [None] * len(diagnosed) if prescription is None else [layer.qk for layer in prescription.layers]
    layers = [_panels(own, plan) for own, plan in zip(diagnosed, prescribed, strict=True)]
    is_open = sum(len(layer) for layer in layers) <= OPEN_PANELS
    data = {"layers": layers, "open": len(layers) if is_open else 1, "cut": prescription is not None}
    return Section("spectra", "Spectra", data)


def _panels(diagnosis: LayerDiagnosis, plan: ScoreDecision | None) -> list[Figure]:
    spectrum = diagnosis.spectrum
    keep = spectrum.used if plan is None else plan.keep
    figures = []
    for head, energy, kept, used in zip(spectrum.heads, spectrum.energy, keep, spectrum.used, strict=True):
        energies, is_kept = energy[used].tolist(), kept[used].tolist()
        kept_energy = sum(energy for energy, keep in zip(energies, is_kept, strict=True) if keep)
        note = f"{sum(is_kept)} of {len(is_kept)} · {percent(kept_energy)}"
        figures.append(Figure(spectrum_bars(f"Spectrum of head {head}", energies, is_kept), f"head {head}", note))
    return figures
