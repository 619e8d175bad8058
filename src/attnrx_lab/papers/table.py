"""Tables reproduced from papers: mean, standard deviation and t interval over seeds, next to the paper's number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from attnrx.show.checks.statistics import LEVEL
from attnrx.show.reports.numbers import MISSING, fixed, number, with_unit
from attnrx.support.errors import InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.support.optional import required_module
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import write_json, write_text
from attnrx.support.tables import Marked, markdown_table
from attnrx_lab.papers.experiment import Measure, Run
from attnrx_lab.papers.recipe import Column, Expected, Recipe, Row

KIND, SCHEMA = "attnrx reproduced table", 3

# The possible results of comparing a cell with the paper's number.
AGREES, OFF, UNDECIDED, NOT_AT_PROTOCOL = VERDICTS = ("agrees", "off", "undecided", "not at protocol")
MARKS = {AGREES: "", OFF: " !", UNDECIDED: " ?", NOT_AT_PROTOCOL: " ~"}

ROUNDING = 1e-9  # tolerance for float64, in addition to half a unit of the last printed digit

LEGEND = (
    "In brackets the 95 % interval: over the seeds where there are several, else over the test images; of a difference "
    "between two rows, paired, over both. In parentheses the paper's number. ! marks a number that is off: no value "
    "that rounds to the paper's lies in the 95 % interval for the mean of as many further seeds as the paper has (one "
    "number in twenty is off by chance); ? one whose interval includes no effect as well, or that is one seed's and "
    "rounds to another number, because one seed does not show how much seeds differ; ~ one that was not made at the "
    "paper's protocol, and is not compared. A dash marks what was not measured."
)


@dataclass(frozen=True)
class Cell:
    """One cell of a reproduced table: a number's mean over the seeds, its standard deviation and its 95 % t interval.

    With one seed, `low` and `high` are the interval over test images. `expected` is the paper's number, and `verdict`
    is one of VERDICTS. `expected` and `verdict` are None if the paper prints no number for the cell. `predicted` is the
    95 % interval in which the paper's mean would lie if its runs were drawn like ours (None with one seed). `images` is
    the number of test images, or None if the number is computed from shapes only.
    """

    row: str
    column: str
    value: float
    deviation: float | None
    low: float | None
    high: float | None
    seeds: tuple[float, ...]
    predicted: tuple[float, float] | None
    expected: Expected | None
    verdict: str | None
    images: int | None = None


@dataclass(frozen=True)
class ReproducedTable:
    """A table of a paper, reproduced with our own runs. `rows` are the labels of the rows that were run.

    `deviations` lists everything that differs from the paper. `notes` describes how the data were loaded and how the
    models were trained. `samples` contains the seeds and the number of test images of every scenario.
    """

    recipe: Recipe
    rows: tuple[str, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    deviations: tuple[str, ...]
    notes: tuple[str, ...]
    samples: Mapping[str, Mapping[str, Any]]

    @property
    def verdicts(self) -> dict[str, int]:
        """The number of the paper's numbers that have each verdict."""
        verdicts = [cell.verdict for cell in self.cells]
        return {verdict: verdicts.count(verdict) for verdict in VERDICTS}

    @property
    def off(self) -> tuple[Cell, ...]:
        return tuple(cell for cell in self.cells if cell.verdict == OFF)

    @property
    def source(self) -> str:
        return f"Paper: {self.recipe.paper.rstrip('.')}. Table: {self.recipe.table.rstrip('.')}."

    def cell(self, row: str, column: str) -> Cell | None:
        """Returns one cell by its row's label and its column's key."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)

    def to_records(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "schema": SCHEMA,
            "name": self.recipe.name,
            "title": self.recipe.title,
            "source": self.source,
            "seeds": list(self.seeds),
            "samples": {scenario: dict(sample) for scenario, sample in self.samples.items()},
            "deviations": list(self.deviations),
            "verdicts": self.verdicts,
            "cells": [asdict(cell) for cell in self.cells],
            "not_stated": self.recipe.not_stated,
            "notes": list(self.notes),
        }

    def to_markdown(self) -> str:
        """Returns the table as Markdown: our mean with its interval, then the paper's number in parentheses.

        If a number does not agree with the paper, a mark after it shows the verdict (see `MARKS`).
        """
        columns = self.recipe.columns
        rows = [[row, *(Marked(self._text(row, column)) for column in columns)] for row in self.rows]
        table = markdown_table(["", *(column.title for column in columns)], rows)
        parts = [f"### {self.recipe.title}", table]
        parts.append(f"{self.source} {LEGEND}")
        parts.append("\n".join(f"- {_sample_text(scenario, sample)}" for scenario, sample in self.samples.items()))
        if any(self.verdicts.values()):
            counts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
            parts.append(f"Numbers of the paper: {counts}.")
        for title, lines in (("Not as in the paper:", self.deviations), ("About the runs:", self.notes)):
            if lines:
                parts += [title, "\n".join(f"- {line}" for line in lines)]
        parts.append(f"Not stated in the paper, and chosen here: {self.recipe.not_stated}")
        return "\n\n".join(parts) + "\n"

    def save(self, folder: Path | str) -> tuple[Path, Path]:
        """Writes NAME.json and NAME.md."""
        stem = Path(folder) / self.recipe.name
        record = write_json(stem.with_suffix(".json"), self.to_records())
        return record, write_text(stem.with_suffix(".md"), self.to_markdown())

    def _text(self, row: str, column: Column) -> str:
        cell = self.cell(row, column.key)
        expected = self.recipe.expected.get(row, {}).get(column.key)
        paper = "" if expected is None else f" ({expected.printed})"
        if cell is None:
            return MISSING + paper
        text = _number(cell.value, column, column.unit)
        if cell.low is not None and cell.high is not None:
            text += f" [{_number(cell.low, column)}, {_number(cell.high, column)}]"
        return text + paper + MARKS[cell.verdict or AGREES]


def make_table(
    recipe: Recipe, runs: Sequence[Run], deviations: Mapping[str, Sequence[str]] | None = None, same_shapes: bool = True
) -> ReproducedTable:
    """Fills a recipe's table with the results of finished runs, and skips the rows of scenarios without runs.

    `deviations` lists, by scenario, how the runs deviate from the paper's protocol. If a scenario has deviations, its
    rows are not compared with the paper. Exact quantities, which are computed from shapes, are always compared if
    `same_shapes` is true, i.e. if the models have the paper's shapes. Below the table, the deviations are listed
    together with the `differences` of the experiments, which are the same in every run.
    """
    deviations = deviations or {}
    differences = [f"{run.experiment.scenario}: {each}" for run in runs for each in run.experiment.differences]
    # If `only` selects some scenarios, the table has only their rows.
    rows = [row for row in recipe.rows if any(run.experiment.scenario == row.scenario for run in runs)]
    cells = []
    for row in rows:
        for column in recipe.columns:
            # If a number is a closed form of the shapes, it does not depend on data, seeds or training.
            at_protocol = same_shapes if column.exact else not deviations.get(row.scenario)
            values, interval = _differences(runs, row, column, rows) if column.against else _measured(runs, row, column)
            if values:
                cell = _cell(values, interval, row, column, recipe, at_protocol)
                cells.append(replace(cell, images=None if column.exact else _images(runs, row.scenario)))
    return ReproducedTable(
        recipe,
        rows=tuple(row.label for row in rows),
        cells=tuple(cells),
        seeds=tuple(sorted({run.experiment.seed for run in runs})),
        deviations=tuple(dict.fromkeys([*(each for several in deviations.values() for each in several), *differences])),
        notes=tuple(
            dict.fromkeys(f"{run.experiment.scenario}: {note}" for run in runs for note in run.record["data"]["notes"])
        ),
        samples={
            scenario: {
                "seeds": sorted({run.experiment.seed for run in runs if run.experiment.scenario == scenario}),
                "images": _images(runs, scenario),
            }
            for scenario in dict.fromkeys(run.experiment.scenario for run in runs)
        },
    )


def _images(runs: Sequence[Run], scenario: str) -> int | None:
    """Returns the number of test images of a scenario's runs, or None if they use no images."""
    return next((run.record["data"].get("images") for run in runs if run.experiment.scenario == scenario), None)


def _sample_text(scenario: str, sample: Mapping[str, Any]) -> str:
    seeds = sample["seeds"]
    on = "no images" if sample["images"] is None else f"n = {sample['images']:,} test images"
    return f"{scenario}: {on}, seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _measured(runs: Sequence[Run], row: Row, column: Column) -> tuple[list[float], Estimate | None]:
    """Returns each seed's value and an interval: the t interval over seeds, or the single measurement's interval."""
    measures = [measure for _, measure in _measures(runs, row, column)]
    values = [column.factor * measure["value"] for measure in measures]
    if len(values) > 1:
        return values, t_interval(values)
    if not measures or measures[0]["low"] is None or measures[0]["high"] is None:
        return values, None
    return values, Estimate(measures[0]["value"], measures[0]["low"], measures[0]["high"]).scaled(column.factor)


def _differences(
    runs: Sequence[Run], row: Row, column: Column, rows: Sequence[Row]
) -> tuple[list[float], Estimate | None]:
    """Returns each seed's mean difference from the row `column.against`, and an interval over seeds and images."""
    other = next((each for each in rows if (each.scenario, each.line) == (row.scenario, column.against)), None)
    if other is None or other == row:
        return [], None
    row_samples, other_samples = (
        {seed: measure["samples"] for seed, measure in _measures(runs, each, column) if "samples" in measure}
        for each in (row, other)
    )
    seeds = sorted(row_samples.keys() & other_samples.keys())  # differences are paired, so both rows need the seed
    if not seeds:
        return [], None
    samples = (
        torch.tensor([each[seed] for seed in seeds], dtype=torch.float64) for each in (row_samples, other_samples)
    )
    differences = column.factor * torch.sub(*samples)
    return differences.mean(1).tolist(), crossed_interval(differences)


def _measures(runs: Sequence[Run], row: Row, column: Column) -> list[tuple[int, Measure]]:
    """Returns the (seed, measure) pairs of all runs in which the row's rule was measured."""
    runs_of_scenario = (run for run in runs if row.rule is not None and run.experiment.scenario == row.scenario)
    measures = (
        (run.experiment.seed, run.measure(row.rule or "", column.kind, column.quantity)) for run in runs_of_scenario
    )
    return [(seed, measure) for seed, measure in measures if measure is not None]


def _cell(
    values: Sequence[float], interval: Estimate | None, row: Row, column: Column, recipe: Recipe, at_protocol: bool
) -> Cell:
    """Returns the cell with the mean over seeds, and the 95 % interval that our runs predict for the paper's mean."""
    mean, deviation = fmean(values), stdev(values) if len(values) > 1 else None
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    # The mean of m further seeds has the variance s^2 (1/n + 1/m) about the mean of n seeds. So its interval is
    # sqrt(1 + n/m) times as wide as the t interval.
    wider = (1 + len(values) / recipe.paper_runs) ** 0.5
    predicted = None
    if interval is not None and not column.exact and len(values) > 1:
        predicted = (mean - wider * (mean - interval.low), mean + wider * (interval.high - mean))
    expected = recipe.expected.get(row.label, {}).get(column.key)
    verdict = None
    if expected is not None:
        verdict = _verdict(expected, predicted or (mean, mean), column.null) if at_protocol else NOT_AT_PROTOCOL
        if verdict == OFF and len(values) == 1 and not column.exact:
            verdict = UNDECIDED
    return Cell(row.label, column.key, mean, deviation, low, high, tuple(values), predicted, expected, verdict)


def _verdict(expected: Expected, predicted: tuple[float, float], null: float) -> str:
    """Returns the verdict, which is the result of comparing the predicted interval with the paper's number.

    The verdict is "off" if no value that rounds to the printed number lies in the predicted interval. The verdict is
    "undecided" if the interval includes the null value (no effect) but the printed number's range does not. Such runs
    do not confirm the paper's effect. With one seed the interval is only the measured value. If this value does not
    round to the printed number, `_cell` replaces "off" by "undecided".
    """
    low, high = predicted
    # A number is off if the predicted interval does not overlap the range of values that round to the printed number.
    if not (low <= expected.high + ROUNDING and expected.low - ROUNDING <= high):
        return OFF
    if low <= null <= high and not expected.low <= null <= expected.high:
        return UNDECIDED
    return AGREES


def _number(value: float, column: Column, unit: str = "") -> str:
    return with_unit(number(value) if column.decimals is None else fixed(value, column.decimals), unit)


def crossed_interval(values: Float[Tensor, "runs groups"]) -> Estimate:
    """Returns the mean over runs and groups of images with its t interval. Both are treated as random samples.

    The variance of the mean is MS(runs) + max(MS(groups) - MS(residual), 0), divided by the number of values, where MS
    is a mean square. The degrees of freedom follow Hillis (2007, Statistics in Medicine 26, Section 3), who analyses
    several readers of the same cases. Our runs correspond to his readers, and our groups of images to his cases. With
    one run the interval covers only the variation between groups.
    """
    values = values.double()
    # A two-way analysis of variance without replication has runs, groups, and their interaction (the residual).
    runs, groups = values.shape
    mean = values.mean()
    of_runs, of_groups = values.mean(1), values.mean(0)
    between_groups = runs * (of_groups - mean).square().sum() / (groups - 1)
    if runs == 1:
        variance, degrees = between_groups, float(groups - 1)
    else:
        between_runs = groups * (of_runs - mean).square().sum() / (runs - 1)
        residual = (values - of_runs[:, None] - of_groups + mean).square().sum() / ((runs - 1) * (groups - 1))
        variance = between_runs + (between_groups - residual).clamp(min=0)
        # If the runs are equal, only the groups vary.
        degrees = float(variance.square() * (runs - 1) / between_runs.square()) if between_runs > 0 else math.inf
    half = student_quantile(degrees) * float((variance / values.numel()).sqrt())
    return Estimate(float(mean), float(mean) - half, float(mean) + half)


def student_quantile(degrees: float) -> float:
    """Returns the quantile of Student's t for two-sided intervals at LEVEL."""
    return float(required_module("scipy.stats", "lab", "intervals over runs").t.ppf((1 + LEVEL) / 2, degrees))


def t_interval(values: Sequence[float]) -> Estimate:
    """Returns the mean of at least two independent runs with its t interval.

    Raises:
        InvalidInput: There are fewer than two runs.
    """
    if len(values) < 2:
        raise InvalidInput(f"{len(values)} run(s): an interval over runs needs at least two of them.")
    mean = fmean(values)
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)
