"""Ranks: the kept directions of every head and every MLP map, one heat map per pathway, and tables."""

from typing import Any

from attnrx.reports.content import ReportContent
from attnrx.reports.figures import LEVELS, HeatMap
from attnrx.reports.numbers import number, percent
from attnrx.reports.ranks import HeadRank, PathwayRanks, prescribed_ranks
from attnrx.reports.sections.section import Figure, Section

DENSE = 9  # from this many columns on the cells are small

CAPTIONS = {
    "Query and key": "Directions in which a head scores pairs of tokens.",
    "Value and output": "Value dimensions of a head.",
    "MLP": "Ranks of the two maps; a map that is not factorized is marked “all”.",
}
SHARED = "A cell across a layer is the number of directions shared by all its heads."


def ranks(content: ReportContent) -> Section | None:
    """Returns one heat map per pathway, coloured from rank zero to full rank, and the numbers as tables."""
    found = content.ranks
    if not found and content.prescription is not None:
        found = prescribed_ranks(content.prescription, content.diagnosis)
    if not found:
        return None
    data = {
        "figures": [_figure(pathway) for pathway in found],
        "tables": [_table(pathway) for pathway in found],
        "steps": range(LEVELS),
        "dense": any(_is_dense(pathway) for pathway in found),
    }
    return Section("ranks", "Ranks", data)


def _is_dense(pathway: PathwayRanks) -> bool:
    return len(pathway.columns) >= DENSE


def _figure(pathway: PathwayRanks) -> Figure:
    shared = any(len(layer) == 1 < len(pathway.columns) for layer in pathway.layers)
    picture = HeatMap(
        f"{pathway.name}: rank of every part, from zero to full",
        [[None if part.rank is None else part.share for part in layer] for layer in pathway.layers],
        0.0,
        1.0,
        dense=_is_dense(pathway),
        columns=tuple(name.removeprefix("head ") for name in pathway.columns)
        if _is_dense(pathway)
        else pathway.columns,
        texts=[[_short(part) for part in layer] for layer in pathway.layers],
        tips=[[f"{name}: {words}" for name, words in _descriptions(pathway, layer)] for layer in pathway.layers],
    )
    share = percent(pathway.kept / max(pathway.full, 1))
    note = f"{number(pathway.kept)} of {number(pathway.full)} kept, {share}"
    caption = CAPTIONS.get(pathway.name, "")
    return Figure(picture.draw(), pathway.name, note, f"{caption} {SHARED}".strip() if shared else caption)


def _descriptions(pathway: PathwayRanks, layer: tuple[HeadRank, ...]) -> list[tuple[str, str]]:
    names = pathway.columns if len(layer) == len(pathway.columns) else ("all heads together",)
    return [(name, _words(part)) for name, part in zip(names, layer, strict=True)]


def _short(part: HeadRank) -> str:
    if part.rank is None:
        return ""
    return "all" if part.whole else number(part.rank)


def _words(part: HeadRank) -> str:
    if part.rank is None:
        return "removed"
    return f"all {number(part.full)}, one matrix" if part.whole else f"{number(part.rank)} of {number(part.full)}"


def _table(pathway: PathwayRanks) -> dict[str, Any]:
    rows = [
        {"layer": index, "cells": [words for _, words in _descriptions(pathway, layer)], "span": _span(pathway, layer)}
        for index, layer in enumerate(pathway.layers)
    ]
    return {"name": pathway.name, "columns": pathway.columns, "rows": rows}


def _span(pathway: PathwayRanks, layer: tuple[HeadRank, ...]) -> int:
    return len(pathway.columns) if len(layer) == 1 else 1
