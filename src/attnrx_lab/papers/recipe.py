"""Recipes, which describe the tables of papers by their runs, rows, columns and printed numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.support.errors import InvalidInput
from attnrx_lab.papers.experiment import Experiment, MeasureKey

# The SVDA paper prints "near 0 pp" and "≈ 0.00 pp", and SPOT's Table 7 "<0.01".
_PRINTED = re.compile(
    r"(?P<sign>near |\N{ALMOST EQUAL TO} |<)?"
    r"(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?)(?:%| pp)?"
)


@dataclass(frozen=True)
class Row:
    """One line of a table: the results of one rule or method in one scenario, or, without a rule, only printed numbers.

    `line` is the part of the label that this row shares with rows of other scenarios.
    """

    label: str
    scenario: str
    rule: str | None = None
    line: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table, which shows one quantity of one kind of realized model (e.g. masked), times `factor`.

    Use `factor=-1` if the paper prints a loss as a positive number. With `decimals=None`, numbers have three
    significant digits. An `exact` quantity follows from the paper's shapes, so it does not depend on training, data or
    seeds. `null` is the value of the quantity if the compressed model equals its reference. A measured interval that
    includes `null` cannot confirm a different printed number. If `against` is the `line` of another row in the
    scenario, the column shows the difference from this row. The difference is paired by seed and by groups of images,
    so the quantity needs samples for these groups.
    """

    key: str
    title: str
    kind: str
    quantity: str
    unit: str = ""
    decimals: int | None = 2
    factor: float = 1.0
    exact: bool = False
    null: float = 0.0
    against: str | None = None


@dataclass(frozen=True)
class Expected:
    """A number as printed in the paper, with the range of values that round to this number."""

    printed: str
    paper: float
    low: float
    high: float

    @classmethod
    def of(cls, printed: Any) -> "Expected":
        """Parses the paper's text, e.g. `+1.37 pp`.

        The range extends by half a unit of the last digit to either side. `<0.01` means the range from 0 to 0.01.

        Raises:
            InvalidInput: The text is not a printed number.
        """
        match = _PRINTED.fullmatch(printed) if isinstance(printed, str) else None
        if match is None:
            raise InvalidInput(
                f"{printed!r} is not a printed number: give the text of the paper, e.g. '23.34%', '+1.37 pp' or "
                "'<0.01'. Its last digit is the tolerance."
            )
        # Half a unit of the last printed digit allows only for rounding.
        paper, half = float(match["number"].replace(",", "")), 0.5 * 10.0 ** -len(match["decimals"] or "")
        if match["sign"] == "<":  # an upper bound of a quantity that is never negative
            return cls(printed, paper, 0.0, paper)
        return cls(printed, paper, paper - half, paper + half)


@dataclass(frozen=True)
class Recipe:
    """Describes a paper's table by its rows, its columns and the protocol of its runs.

    A scenario (a dataset or a model) may have several runs. A row shows the results of the runs that measured its rule.
    `table` is the table's number in the paper, and `not_stated` lists the choices that the paper does not state.
    `seeds` are the default seeds. If `states_seeds` is true, they are the paper's seeds. If it is false, each printed
    number is treated as the result of one run. `load_recipe` adds the `name`, the `paper`, and the `expected` numbers
    by row label and column key.
    """

    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    protocol: tuple[Experiment, ...]
    table: str
    not_stated: str
    seeds: tuple[int, ...] = (42, 43, 44)
    states_seeds: bool = False
    name: str = ""
    paper: str = ""
    expected: Mapping[str, Mapping[str, Expected]] = field(default_factory=dict)

    @property
    def paper_runs(self) -> int:
        """The number of runs behind each of the paper's numbers, or 1 if the paper does not state its seeds."""
        return len(self.seeds) if self.states_seeds else 1

    def keys(self, scenario: str) -> frozenset[MeasureKey]:
        """Returns the rule, kind and quantity of every number that the rows of a scenario show."""
        rules = [row.rule for row in self.rows if row.scenario == scenario and row.rule is not None]
        return frozenset((rule, column.kind, column.quantity) for rule in rules for column in self.columns)
