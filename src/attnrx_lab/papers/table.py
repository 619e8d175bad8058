"""Tables over several seeds: mean, standard deviation and t interval, with the printed number."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from attnrx.checks.statistics import t_interval
from attnrx.reports.numbers import MISSING, fixed, number, with_unit
from attnrx.serialization.storage import write_json, write_text
from attnrx_lab.comparison.comparing import markdown_table
from attnrx_lab.papers.experiment import Measure, Run
from attnrx_lab.papers.recipe import Column, Expected, RecipeFile, Row

KIND, SCHEMA = "attnrx reproduced table", 2

# The outcomes of comparing a cell with the paper's number.
AGREES, OFF, UNDECIDED, NOT_AT_PROTOCOL = VERDICTS = ("agrees", "off", "undecided", "not at protocol")
MARKS = {AGREES: "", OFF: " !", UNDECIDED: " ?", NOT_AT_PROTOCOL: " ~"}


@dataclass(frozen=True)
class Cell:
    """One measured number: the mean over the seeds, their standard deviation and their 95 % t interval.

    With one seed the interval is that of its own measurement, over test images. `expected` is the paper's number, and
    `predicted` the 95 % interval in which it lies if the paper's runs are further draws of ours (`_cell`).
    """

    row: str
    column: str
    value: float
    deviation: float | None
    low: float | None
    high: float | None
    seeds: tuple[float, ...]
    expected: Expected | None = None
    predicted: tuple[float, float] | None = None
    null: float = 0.0
    at_protocol: bool = True

    @property
    def verdict(self) -> str | None:
        """How the number compares with the paper's, one of VERDICTS; None where the paper has none.

        It is off where no value that rounds to the printed one lies in the predicted interval. It is undecided where
        that interval includes the null value too, and the printed number excludes it: noise is no agreement.
        """
        if self.expected is None:
            return None
        if not self.at_protocol:
            return NOT_AT_PROTOCOL
        low, high = self.predicted or (self.value, self.value)
        if not (low <= self.expected.high + ROUNDING and self.expected.low - ROUNDING <= high):
            return OFF
        if low <= self.null <= high and not self.expected.low <= self.null <= self.expected.high:
            return UNDECIDED
        return AGREES


@dataclass(frozen=True)
class Quoted:
    """A number of the paper without a measured one."""

    row: str
    column: str
    expected: Expected


@dataclass(frozen=True)
class ReproducedTable:
    """A table of a paper, made again. `deviations` list everything that was not done as the paper states, `not_stated`
    the choices that the paper does not state, `notes` how the data were read and the runs made.

    `page` is a page of pictures, if the recipe draws one.
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
    not_stated: str = ""
    notes: tuple[str, ...] = ()

    @property
    def verdicts(self) -> dict[str, int]:
        """The number of the paper's numbers with each verdict."""
        found = [cell.verdict for cell in self.cells]
        return {verdict: found.count(verdict) for verdict in VERDICTS}

    @property
    def off(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.verdict == OFF)

    def cell(self, row: str, column: str) -> Cell | None:
        """Returns one cell by the label of its row and the key of its column."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def to_records(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "seeds": list(self.seeds),
            "deviations": list(self.deviations),
            "verdicts": self.verdicts,
            "cells": [{**asdict(cell), "verdict": cell.verdict} for cell in self.cells],
            "not_stated": self.not_stated,
            "notes": list(self.notes),
            "quoted": [asdict(each) for each in self.quoted],
        }

    def to_markdown(self) -> str:
        """Returns the table as Markdown: our mean with its interval, then the paper's number in parentheses.

        Every number that does not agree is marked with its verdict (`MARKS`).
        """
        titles = ["", *(column.title for column in self.columns)]
        rows = [[row, *(self._text(row, column) for column in self.columns)] for row in self.rows]
        lines = [f"### {self.title}", "", markdown_table(titles, rows)]
        lines += ["", f"{self.source} Seeds: {', '.join(map(str, self.seeds))}. {LEGEND}"]
        if any(self.verdicts.values()):
            counts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
            lines += ["", f"Numbers of the paper: {counts}."]
        if self.deviations:
            lines += ["", "Not as in the paper:", "", *(f"- {deviation}" for deviation in self.deviations)]
        if self.notes:
            lines += ["", "About the runs:", "", *(f"- {note}" for note in self.notes)]
        if self.not_stated:
            lines += ["", f"Not stated in the paper, and chosen here: {self.not_stated}"]
        return "\n".join(lines) + "\n"

    def save(self, folder: Path | str) -> tuple[Path, ...]:
        """Writes NAME.json and NAME.md, and NAME.html if there are pictures."""
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
            text += f" ({cell.expected.printed})" + MARKS[cell.verdict or AGREES]
        return text


# Rounding of float64 beside the half unit of a printed digit.
ROUNDING = 1e-9

LEGEND = (
    "In brackets the 95 % interval: over the seeds where there are several, else over the test images. In parentheses "
    "the paper's number. ! marks a number that is off: no value that rounds to the paper's lies in the 95 % interval "
    "for the mean of as many further seeds as the paper has (one number in twenty is off by chance); ? one whose "
    "interval includes no effect as well; ~ one that was not made at the paper's protocol, and is not compared. A dash "
    "marks what was not measured."
)


def make_table(
    file: RecipeFile,
    runs: Mapping[str, Sequence[Run]],
    deviations: Mapping[str, Sequence[str]] | None = None,
    same_shapes: bool = True,
) -> ReproducedTable:
    """Fills a recipe's table from the finished runs of each scenario; rows of scenarios without runs are skipped.

    `deviations` lists by scenario what was not done as the paper states: its rows are then not compared with the paper,
    but for exact quantities, as long as the runs have the `same_shapes` as the paper.
    """
    recipe, deviations = file.recipe, deviations or {}
    rows = [row for row in recipe.rows if runs.get(row.scenario)]
    cells, quoted = [], []
    for row in rows:
        for column in recipe.columns:
            expected = file.expected.get(row.label, {}).get(column.key)
            if values := _values(runs[row.scenario], row, column):
                cell = _cell(values, row, column, len(recipe.seeds))
                at_protocol = same_shapes if column.exact else not deviations.get(row.scenario)
                cells.append(replace(cell, expected=expected, at_protocol=at_protocol))
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
        deviations=tuple(dict.fromkeys(each for several in deviations.values() for each in several)),
        quoted=tuple(quoted),
        page=recipe.draw(every) if recipe.draw and every else None,
        not_stated=file.header["Not stated"],
        notes=tuple(dict.fromkeys(f"{run.experiment.scenario}: {note}" for run in every for note in run.notes)),
    )


def _values(runs: Sequence[Run], row: Row, column: Column) -> list[Measure]:
    if row.rule is None:
        return []
    found = (run.measure(row.rule, column.kind, column.quantity) for run in runs)
    return [measure for measure in found if measure is not None]


def _cell(measures: Sequence[Measure], row: Row, column: Column, paper_seeds: int) -> Cell:
    """Averages the seeds, and predicts the 95 % interval for the mean of the paper's seeds, drawn as ours were."""
    values = [column.factor * measure["value"] for measure in measures]
    mean, deviation, wider = fmean(values), None, 1.0
    low: float | None
    high: float | None
    if len(values) > 1:
        over = t_interval(values)
        low, high, deviation = over.low, over.high, stdev(values)
        # A mean of m further seeds has the variance s^2 (1/n + 1/m) about a mean of n: the t interval, sqrt(1 + n/m)
        # times as wide.
        wider = (1 + len(values) / paper_seeds) ** 0.5
    else:
        ends = [column.factor * measures[0][end] for end in ("low", "high") if measures[0][end] is not None]
        low, high = sorted(ends) if len(ends) == 2 else (None, None)  # a negative factor swaps them
    predicted = None
    if low is not None and high is not None and not column.exact:
        predicted = (mean - wider * (mean - low), mean + wider * (high - mean))
    return Cell(row.label, column.key, mean, deviation, low, high, tuple(values), predicted=predicted, null=column.null)


def _number(value: float, column: Column, unit: bool = True) -> str:
    text = number(value) if column.decimals is None else fixed(value, column.decimals)
    return with_unit(text, column.unit if unit else "")
