"""Recipes: a table of a paper as plain data, its runs, and the printed numbers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.support.errors import InvalidInput
from attnrx_lab.papers.experiment import Experiment, MeasureKey

# "near 0 pp" and "≈ 0.00 pp" are in the SVDA paper, "<0.01" in SPOT's Table 7.
_PRINTED = re.compile(
    r"(?P<sign>near |\N{ALMOST EQUAL TO} |<)?"
    r"(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d+))?)(?:%| pp)?"
)


@dataclass(frozen=True)
class Row:
    """One line of a table: the results of one rule in one scenario; without a rule, the printed numbers only.

    `line` is the part of the label that rows of other scenarios share.
    """

    label: str
    scenario: str
    rule: str | None = None
    line: str = ""


@dataclass(frozen=True)
class Column:
    """One quantity of one realization, times `factor`: papers do not all count a loss as negative.

    `decimals=None` writes three significant digits. An `exact` quantity is a closed form of the paper's shapes: it does
    not depend on training, data or seeds. `null` is the value for a candidate that equals its reference: an interval
    that includes it cannot confirm any other number. With `against`, the `line` of another row of the scenario, it is
    the difference from that row: paired by seed and by groups of images, over which the quantity has samples.
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
    """A number as the paper prints it, and the range of values that round to it; there is no other tolerance."""

    printed: str
    paper: float
    low: float
    high: float

    @classmethod
    def of(cls, printed: Any) -> "Expected":
        """Parses the text in the paper, e.g. `+1.37 pp`: half a unit of its last digit to either side.

        `<0.01` is the range from 0 to 0.01.

        Raises:
            InvalidInput: The text is not a printed number.
        """
        match = _PRINTED.fullmatch(printed) if isinstance(printed, str) else None
        if match is None:
            raise InvalidInput(
                f"{printed!r} is not a printed number: give the text of the paper, e.g. '23.34%', '+1.37 pp' or "
                "'<0.01'. Its last digit is the tolerance."
            )
        # Half a unit of the last printed digit: as far as rounding goes, and no tolerance beyond it.
        paper, half = float(match["number"].replace(",", "")), 0.5 * 10.0 ** -len(match["decimals"] or "")
        if match["sign"] == "<":  # an upper bound of something that is not negative
            return cls(printed, paper, 0.0, paper)
        return cls(printed, paper, paper - half, paper + half)


@dataclass(frozen=True)
class Recipe:
    """A table of a paper: its rows, its columns, and the protocol of the runs it is made from.

    A scenario may have several runs: a row is filled by those that measured its rule. `table` is its number in the
    paper, `not_stated` lists the choices that the paper does not state, and `seeds` are the default. With
    `states_seeds` they are the paper's own; else its numbers are taken as those of one run. `load_recipe` adds its
    name, the paper, and the `expected` numbers by row label and column key.
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
        """The number of runs behind each of the paper's numbers, as far as it states them."""
        return len(self.seeds) if self.states_seeds else 1

    def keys(self, scenario: str) -> frozenset[MeasureKey]:
        """Returns the numbers that the rows of a scenario show."""
        rules = [row.rule for row in self.rows if row.scenario == scenario and row.rule is not None]
        return frozenset((rule, column.kind, column.quantity) for rule in rules for column in self.columns)
