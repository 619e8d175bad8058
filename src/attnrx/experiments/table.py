"""Tables over several seeds: mean, deviation and t interval, beside what the paper printed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from attnrx.checks.statistics import t_interval
from attnrx.experiments.experiment import Run
from attnrx.experiments.recipe import Column, Expected, RecipeFile, Row
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
class Quoted:
    """A number of the paper beside which there is none of ours."""

    row: str
    column: str
    expected: Expected


@dataclass(frozen=True)
class ReproducedTable:
    """A table of a paper, made again. `deviations` list everything that was not done as the paper did it.

    `page` is a page of pictures, where the recipe draws one.
    """

    name: str
    title: str
    source: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    deviations: tuple[str, ...]
    quoted: tuple[Quoted, ...] = ()
    page: str | None = None

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
            "quoted": [asdict(each) for each in self.quoted],
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

    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Writes NAME.json and NAME.md, and NAME.html where there are pictures."""
        stem = Path(folder) / self.name
        record = write_json(stem.with_suffix(".json"), json.loads(json.dumps(self.to_records())))
        text = write_text(stem.with_suffix(".md"), self.to_markdown())
        if self.page is None:
            return record, text
        return record, text, write_text(stem.with_suffix(".html"), self.page)

    def _text(self, row: str, column: Column) -> str:
        cell = self.cell(row, column.key)
        if cell is None:
            found = (each for each in self.quoted if (each.row, each.column) == (row, column.key))
            return next((f"{MISSING} ({each.expected.printed})" for each in found), MISSING)
        text = _number(cell.value, column)
        if cell.low is not None and cell.high is not None:
            text += f" [{_number(cell.low, column, unit=False)}, {_number(cell.high, column, unit=False)}]"
        if cell.expected is not None:
            text += f" ({cell.expected.printed})" + ("" if cell.agrees else " !")
        return text


LEGEND = (
    "In brackets the 95 % interval: over the seeds where there are several, else over the test images. In parentheses "
    "the paper's number; ! marks a mean outside the recipe's tolerance, and a dash what was not measured."
)


def make_table(file: RecipeFile, runs: Mapping[str, Sequence[Run]], deviations: Sequence[str] = ()) -> ReproducedTable:
    """Fills a recipe's table from the finished runs of each scenario; rows of scenarios without runs are left out."""
    recipe = file.recipe
    rows = [row for row in recipe.rows if runs.get(row.scenario)]
    cells, quoted = [], []
    for row in rows:
        for column in recipe.columns:
            expected = file.expected.get(row.label, {}).get(column.key)
            if values := _values(runs[row.scenario], row, column):
                cells.append(_cell(values, row, column, expected))
            elif expected is not None:
                quoted.append(Quoted(row.label, column.key, expected))
    every = [run for several in runs.values() for run in several]
    return ReproducedTable(
        name=file.name,
        title=recipe.title,
        source=f"Paper: {file.header['Paper'].rstrip('.')}. Table: {file.header['Table'].rstrip('.')}.",
        rows=tuple(row.label for row in rows),
        columns=recipe.columns,
        cells=tuple(cells),
        seeds=tuple(sorted({run.experiment.seed for run in every})),
        deviations=tuple(deviations),
        quoted=tuple(quoted),
        page=recipe.draw(every) if recipe.draw and every else None,
    )


def _values(runs: Sequence[Run], row: Row, column: Column) -> list[Mapping[str, Any]]:
    if row.rule is None:
        return []
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
