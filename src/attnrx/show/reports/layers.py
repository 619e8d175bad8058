"""Report sections about layers and heads: what was removed and why, and the readings of each head in the diagnosis."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.show.reports.numbers import number, percent, plain, short
from attnrx.vit.maps import LINEAR_MAPS

LEVELS = 9  # colours of the sequential scale, which the style sheet defines as .level-0 to .level-8

# The tables of ranks, with their captions.
SCORES, VALUES, MLP, UNITS = "Query and key", "Value and output", "MLP", "Hidden units"
CAPTIONS = {
    SCORES: "Directions in which a head scores pairs of tokens; one cell across a layer is shared by all its heads.",
    VALUES: "Value dimensions of a head.",
    MLP: "Ranks of the two maps.",
    UNITS: "Hidden units of the MLP; the second map is refitted to those that stay.",
}

# Captions of the readings, in the order of the page. Readings without a caption follow. The first OPEN_FIGURES figures
# are open, all others are folded. The effective rank in the metric "mix" comes first, because the plain effective rank
# of a dense head is only its number of directions.
MEANING = {
    "effective_rank_mix": "The effective number of directions on the diagnosed images, by the metric of plans (mix).",
    "selectivity": "0 where attention is uniform, 1 where every query attends to one token.",
    "effective_rank": "The effective number of directions by the entropy of the energy (Eq. 24).",
    "entropy": "Spectral entropy in nats (Eq. 23).",
    "sparsity": "Share of directions below a tenth of the head's largest strength (Eq. 29: an absolute threshold).",
    "active_directions": "Directions of at least that strength (Eq. 30).",
    "alignment": "Mean cosine between queries and keys, before the strengths.",
    "sensitivity": "Largest strength times the scale: the bound on the change of a score (Proposition 4).",
    "perturbation_response": "Change of the attention map under a small change of the image (Eq. 33).",
}
OPEN_FIGURES = 2


@dataclass(frozen=True)
class Cell:
    """One cell of a heat map: its text, its colour as a step of the scale (None for no colour), and its tooltip."""

    text: str = ""
    step: int | None = None
    tip: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A coloured table with a row per layer and a column per head or map. If a row has one cell, it fills the row."""

    title: str
    note: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def colour_step(share: float) -> int:
    """Returns the step of the colour scale for a value, given as a share of the scale's range and clipped to [0, 1]."""
    return min(LEVELS - 1, max(0, int(share * LEVELS)))  # a share of 1 belongs to the last step


def treatment(prescription: Prescription, diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Returns the data for the report's section about the prescription: the rules, and one reason per head."""
    pairs = zip(prescription.layers, _heads(prescription, diagnosis), strict=True)
    removed = prescription.removed_share
    return {
        "prescription": prescription,
        "layers": [_reasons(layer, heads) for layer, heads in pairs],
        "others": [
            why for part in (prescription.depth, prescription.tokens) if part is not None for why in part.reasons
        ],
        "removed": percent(removed) if removed else "",
        "summary": "The rules, and the reason for every head and stage",
    }


def _heads(prescription: Prescription, diagnosis: Diagnosis | None) -> list[tuple[int, ...]]:
    """Returns the original indices of every layer's heads. Without a diagnosis, the heads are counted from 0."""
    if diagnosis is None:
        return [tuple(range(len(layer.heads))) for layer in prescription.layers]
    return [layer.spectrum.heads for layer in diagnosis.layers]


def _reasons(layer: LayerPrescription, heads: Sequence[int]) -> dict[str, Any]:
    scores = layer.qk
    keeps = f"heads keep {plain(list(scores.ranks), 16)} of {scores.keep.shape[1]}"
    if scores.is_shared:
        keeps = f"the heads share {number(scores.kept)} of {number(scores.directions)}"
    removed = 1 - scores.kept / scores.directions if scores.directions else 0.0
    summary = f"{percent(removed)} of the score directions removed; {keeps}" if removed else "all score directions kept"
    return {
        "heads": list(
            zip((head + 1 for head in heads), scores.ranks, layer.heads.tolist(), scores.reasons, strict=True)
        ),
        "summary": summary,
        "others": [
            (name, why) for name, decision in layer.decisions.items() if name != "qk" for why in decision.reasons
        ],
    }


def changes(prescription: Prescription, diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    """Returns texts and heat maps of ranks that show what was removed, or None if nothing was removed."""
    facts, figures = [], []
    for title, (columns, rows) in ranks(prescription, diagnosis).items():
        parts = [part for row in rows for part in row if part is not None]
        kept, full = sum(kept or 0 for kept, _ in parts), sum(full for _, full in parts)
        if kept == full:  # nothing was removed, so the heat map would have a single colour
            continue
        what = "units" if title == UNITS else "ranks"
        words = f"{percent(1 - kept / full)} of the {what} removed, {number(kept)} of {number(full)} kept"
        facts.append((title, words))
        removed = sum(kept is None for kept, _ in parts)
        if removed and title == SCORES:
            facts.append(("Heads", f"{number(removed)} of {number(len(parts))} removed"))
        cells = tuple(tuple(_rank_cells(layer, columns, row)) for layer, row in enumerate(rows))
        figures.append(HeatMap(title, "", CAPTIONS[title], columns, cells))
    if prescription.depth is not None:
        facts.append(
            ("Blocks", f"{number(len(prescription.depth.removed))} of {number(len(prescription.layers))} removed")
        )
    if prescription.tokens is not None:
        policy = prescription.tokens.policy
        stages = len(policy.layers)
        facts.append(("Tokens", f"{policy.reducer} before {number(stages)} layer{'s' * (stages != 1)}"))
    return {"facts": facts, "figures": figures, "steps": LEVELS} if facts else None


# The kept rank and the full rank of a head or map. The kept rank is None if the head was removed. If an earlier
# compression had already removed the head, the whole pair is None.
Rank = tuple[int | None, int] | None


def ranks(
    prescription: Prescription, diagnosis: Diagnosis | None = None
) -> dict[str, tuple[tuple[str, ...], list[list[Rank]]]]:
    """Returns the kept ranks as tables, each with its column titles and a row per layer.

    There is a table for query and key, and one for every other map that was reduced. With a diagnosis, heads have their
    indices from the original model, and their own numbers of directions before the reduction.
    """
    layers, heads = prescription.layers, _heads(prescription, diagnosis)
    head_columns = tuple(
        f"head {head + 1}" for head in range(1 + max((head for each in heads for head in each), default=0))
    )

    def by_head(layer: int, kept: Sequence[int], full: Sequence[int]) -> list[Rank]:
        row: list[Rank] = [None] * len(head_columns)
        for head, rank, whole, stays in zip(heads[layer], kept, full, layers[layer].heads.tolist(), strict=True):
            row[head] = (rank if stays else None, whole)
        return row

    scores: list[list[Rank]] = []
    for index, qk in enumerate(layer.qk for layer in layers):
        full = [qk.keep.shape[1]] * len(qk.keep)
        if diagnosis is not None:
            full = [int(rank) for rank in diagnosis.layers[index].spectrum.rank]
        scores.append([(qk.kept, qk.directions)] if qk.is_shared else by_head(index, qk.ranks, full))
    tables = {SCORES: (head_columns, scores)}
    # A layer without a decision on a map keeps all of its directions. Their number comes from the other layers.
    full_ranks = {
        name: max(layer.outputs[name].strength.shape[1] for layer in layers if name in layer.outputs)
        for name in ("vo", *LINEAR_MAPS)
        if any(name in layer.outputs for layer in layers)
    }

    def kept_of(layer: LayerPrescription, name: str, units: int) -> Sequence[int]:
        return layer.outputs[name].ranks if name in layer.outputs else [full_ranks[name]] * units

    if "vo" in full_ranks:
        counts = [len(each) for each in heads]
        kept = [kept_of(layer, "vo", count) for layer, count in zip(layers, counts, strict=True)]
        values = [by_head(index, kept[index], [full_ranks["vo"]] * count) for index, count in enumerate(counts)]
        tables[VALUES] = head_columns, values
    if linear := [name for name in LINEAR_MAPS if name in full_ranks]:
        rows: list[list[Rank]] = [
            [(kept_of(layer, name, 1)[0], full_ranks[name]) for name in linear] for layer in layers
        ]
        tables[MLP] = tuple(linear), rows
    hidden = [layer.hidden for layer in layers]
    if full := max((len(decision.keep) for decision in hidden if decision is not None), default=0):
        pairs = [(full, full) if each is None else (int(each.keep.sum()), len(each.keep)) for each in hidden]
        tables[UNITS] = ("hidden",), [[pair] for pair in pairs]
    return tables


def _rank_cells(layer: int, columns: Sequence[str], row: Sequence[Rank]) -> Iterator[Cell]:
    names = columns if len(row) == len(columns) else ("all heads together",)
    for name, part in zip(names, row, strict=True):
        kept, full = part or (None, 0)
        if kept is None:
            yield Cell("removed", None, f"layer {layer + 1}, {name}: removed")
        else:
            words = f"{number(kept)} of {number(full)}"
            yield Cell(number(kept), colour_step(kept / max(full, 1)), f"layer {layer + 1}, {name}: {words}")


def maps(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Returns heat maps of the readings: the first OPEN_FIGURES are open on the page, and the others are collapsed."""
    names = readings_per_head(diagnosis)
    if not names:
        return None
    figures = [
        _reading_figure(name, diagnosis)
        for name in [*(name for name in MEANING if name in names), *sorted(names - MEANING.keys())]
    ]
    summary = ", ".join(figure.title for figure in figures)
    return {"main": figures[:OPEN_FIGURES], "rest": figures[OPEN_FIGURES:], "steps": LEVELS, "summary": summary}


def readings_per_head(diagnosis: Diagnosis) -> set[str]:
    """Returns the names of readings that have one number per head in every layer, as a heat map requires."""
    per_head = [
        {name for name, reading in layer.readings.items() if tuple(reading.shape) == (len(layer.spectrum.heads),)}
        for layer in diagnosis.layers
    ]
    return set[str]().union(*per_head[:1]).intersection(*per_head)


def _reading_figure(name: str, diagnosis: Diagnosis) -> HeatMap:
    layers = diagnosis.layers
    columns = 1 + max((head for layer in layers for head in layer.spectrum.heads), default=0)
    values = [value for layer in layers for value in layer.readings[name].tolist() if math.isfinite(value)] or [0.0]
    full_rank = max(layer.spectrum.strength.shape[1] for layer in layers)
    limits = {"effective_rank": (0.0, float(full_rank)), "selectivity": (0.0, 1.0), "sparsity": (0.0, 1.0)}
    low, high = limits.get(name, (min(values), max(values)))
    rows = []
    for index, layer in enumerate(layers):
        # A head's column is its index in the original model. Columns without a head stay "removed".
        row = [Cell("removed", None, f"layer {index + 1}, head {head + 1}: removed") for head in range(columns)]
        for head, value in zip(layer.spectrum.heads, layer.readings[name].tolist(), strict=True):
            share = (value - low) / (high - low) if high > low else 0.5
            step = colour_step(share) if math.isfinite(share) else None
            row[head] = Cell(number(value, 2), step, f"layer {index + 1}, head {head + 1}: {number(value)}")
        rows.append(tuple(row))
    title = name.replace("rank_", "rank, ").replace("_", " ").capitalize()
    heads = tuple(f"head {head + 1}" for head in range(columns))
    return HeatMap(title, f"{short(low, 3)} to {short(high, 3)}", MEANING.get(name, ""), heads, tuple(rows))
