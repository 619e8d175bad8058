"""Tables over several seeds: mean, deviation and t interval, beside what the paper printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from attnrx.checks.statistics import t_interval
from attnrx.experiments.recipe import Column, Expected, RecipeFile, Row
from attnrx.experiments.svda import SvdaRun
from attnrx.reports.numbers import MISSING, fixed, number, with_unit
from attnrx.storage import write_json, write_text

KIND, SCHEMA = "attnrx reproduced table", 1


@dataclass(frozen=True)
class Cell:
    """One number of ours: the mean over the seeds, their deviation and their 95 % t interval.

    With one seed the interval is that of its own measurement, over test images. `expected` is the paper's number.
    """

    row: str
    column: str
    value: float
    deviation: float | None
    low: float | None
    high: float | None
    seeds: tuple[float, ...]
    expected: Expected | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the mean lies within the tolerance of the paper's number; None where the paper has none."""
        return None if self.expected is None else abs(self.value - self.expected.paper) <= self.expected.tolerance


@dataclass(frozen=True)
class ReproducedTable:
    """A table of a paper, made again. `deviations` list everything that was not done as the paper did it."""

    name: str
    title: str
    source: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    deviations: tuple[str, ...]

    def cell(self, row: str, column: str) -> Cell | None:
        """Gives one cell by the label of its row and the key of its column."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def to_records(self) -> dict[str, Any]:
        """Gives everything as JSON-ready values."""
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "seeds": list(self.seeds),
            "deviations": list(self.deviations),
            "cells": [{**asdict(cell), "agrees": cell.agrees} for cell in self.cells],
        }

    def to_markdown(self) -> str:
        """Gives the table as Markdown: our mean with its interval, then the paper's number in parentheses.

        A number outside the tolerance is marked with an exclamation mark.
        """
        titles = ["", *(column.title for column in self.columns)]
        lines = [f"### {self.title}", "", _line(titles), "|" + "---|" * len(titles)]
        lines += [_line([row, *(self._text(row, column) for column in self.columns)]) for row in self.rows]
        lines += ["", f"{self.source} Seeds: {', '.join(map(str, self.seeds))}. {LEGEND}"]
        if self.deviations:
            lines += ["", "Not as in the paper:", "", *(f"- {deviation}" for deviation in self.deviations)]
        return "\n".join(lines) + "\n"

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Writes NAME.json and NAME.md."""
        stem = Path(folder) / self.name
        return (
            write_json(stem.with_suffix(".json"), json.loads(json.dumps(self.to_records()))),
            write_text(stem.with_suffix(".md"), self.to_markdown()),
        )

    def _text(self, row: str, column: Column) -> str:
        cell = self.cell(row, column.key)
        if cell is None:
            return MISSING
        text = _number(cell.value, column)
        if cell.low is not None and cell.high is not None:
            text += f" [{_number(cell.low, column, unit=False)}, {_number(cell.high, column, unit=False)}]"
        if cell.expected is not None:
            text += f" ({cell.expected.printed})" + ("" if cell.agrees else " !")
        return text


LEGEND = (
    "In brackets the 95 % interval: over the seeds where there are several, else over the test images. In parentheses "
    "the paper's number; ! marks a mean outside the recipe's tolerance."
)


def make_table(
    file: RecipeFile, runs: Mapping[str, Sequence[SvdaRun]], deviations: Sequence[str] = ()
) -> ReproducedTable:
    """Fills a recipe's table from the finished runs of each dataset; rows of datasets without runs are left out."""
    rows = [row for row in file.recipe.rows if runs.get(row.dataset)]
    cells = [
        _cell(values, row, column, file.expected.get(row.label, {}).get(column.key))
        for row in rows
        for column in file.recipe.columns
        if (values := _values(runs[row.dataset], row, column))
    ]
    seeds = sorted({run.experiment.seed for several in runs.values() for run in several})
    source = f"Paper: {file.header['Paper'].rstrip('.')}. Table: {file.header['Table'].rstrip('.')}."
    labels = tuple(row.label for row in rows)
    return ReproducedTable(
        file.name, file.recipe.title, source, labels, file.recipe.columns, tuple(cells), tuple(seeds), tuple(deviations)
    )


def _values(runs: Sequence[SvdaRun], row: Row, column: Column) -> list[Mapping[str, Any]]:
    found = (run.measure(row.rule, column.kind, column.quantity) for run in runs)
    return [measure for measure in found if measure is not None]


def _cell(measures: Sequence[Mapping[str, Any]], row: Row, column: Column, expected: Expected | None) -> Cell:
    values = [column.factor * measure["value"] for measure in measures]
    if len(values) > 1:
        over = t_interval(values)
        ends: list[float | None] = [over.low, over.high]
    else:
        ends = [None if measures[0][end] is None else column.factor * measures[0][end] for end in ("low", "high")]
        if column.factor < 0:
            ends.reverse()
    deviation = stdev(values) if len(values) > 1 else None
    return Cell(row.label, column.key, fmean(values), deviation, ends[0], ends[1], tuple(values), expected)


def _number(value: float, column: Column, unit: bool = True) -> str:
    text = number(value) if column.decimals is None else fixed(value, column.decimals)
    return with_unit(text, column.unit if unit else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
