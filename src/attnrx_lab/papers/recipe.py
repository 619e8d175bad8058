"""Recipes: a table of a paper, its runs, and the printed numbers."""

import ast
import json
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrx.errors import InvalidInput, UnknownName
from attnrx_lab.papers.experiment import Experiment, Run

# The fields of a recipe's docstring, one "Name: text" paragraph each.
HEADER = ("Paper", "Table", "Command", "Expected", "Not stated", "Time", "Hardware")

_PRINTED = re.compile(r"(?P<sign>near |\N{ALMOST EQUAL TO} |<)?(?P<number>[+-]?\d+(?:\.(?P<decimals>\d+))?)(?:%| pp)?")


RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@dataclass(frozen=True)
class Row:
    """One line of a table: the results of one rule in one scenario; without a rule, the printed numbers only."""

    label: str
    scenario: str
    rule: str | None = None


@dataclass(frozen=True)
class Column:
    """One quantity of one realization, times `factor`: papers do not all count a loss as negative.

    `decimals=None` writes three significant digits. An `exact` quantity is a closed form of the paper's shapes: it does
    not depend on training, data or seeds. `null` is the value for a candidate that equals its reference: an interval
    that includes it cannot confirm any other number.
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


@dataclass(frozen=True)
class Recipe:
    """A table as plain data: its rows, its columns, and the protocol of the runs it is made from.

    A scenario may have several runs: a row is filled by those that measured its rule.

    `seeds` are those of the paper's protocol. `draw` makes a page of pictures of the runs, for a figure.
    """

    title: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    protocol: tuple[Experiment, ...]
    seeds: tuple[int, ...] = (42, 43, 44)
    draw: Callable[[Sequence[Run]], str] | None = None

    def __post_init__(self):
        known = {experiment.scenario for experiment in self.protocol}
        missing = sorted({row.scenario for row in self.rows} - known)
        if missing or not self.rows or not self.columns or not self.seeds:
            raise InvalidInput(
                f"the recipe {self.title!r} has {len(self.rows)} rows, {len(self.columns)} columns, "
                f"{len(self.seeds)} seeds and no protocol for {missing or 'anything'}; give experiments for every "
                "scenario of its rows, and at least one of everything else."
            )


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
        """
        match = _PRINTED.fullmatch(printed) if isinstance(printed, str) else None
        if match is None:
            raise InvalidInput(
                f"{printed!r} is not a printed number: give the text of the paper, e.g. '23.34%', '+1.37 pp' or "
                "'<0.01'. Its last digit is the tolerance."
            )
        paper, half = float(match["number"]), 0.5 * 10.0 ** -len(match["decimals"] or "")
        if match["sign"] == "<":  # an upper bound of something that is not negative
            return cls(printed, paper, 0.0, paper)
        return cls(printed, paper, paper - half, paper + half)


@dataclass(frozen=True)
class RecipeFile:
    """A recipe with its name, its header, and the paper's numbers by row label and column key."""

    name: str
    header: Mapping[str, str]
    recipe: Recipe
    expected: Mapping[str, Mapping[str, Expected]]


def recipe_names() -> tuple[str, ...]:
    """Returns the names of all recipes, e.g. `svda/table1`."""
    return tuple(sorted(f"{path.parent.name}/{path.stem}" for path in RECIPES.glob("*/*.py")))


def load_recipe(name: str) -> RecipeFile:
    """Runs the file of a recipe, which is plain data, and reads its header and its expected numbers."""
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    path = RECIPES / f"{name}.py"
    recipe: Any = runpy.run_path(str(path)).get("RECIPE")
    if not isinstance(recipe, Recipe):
        raise InvalidInput(f"the recipe {name} ({path}) does not define RECIPE, a Recipe; look at its neighbours.")
    tables = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))
    expected = {
        row: {column: Expected.of(printed) for column, printed in cells.items()}
        for row, cells in tables.get(path.stem, {}).items()
    }
    return RecipeFile(name, read_header(path), recipe, expected)


def read_header(path: Path) -> dict[str, str]:
    """Reads the header of a recipe from its docstring, without running it; raises for missing fields."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    header: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, rest = line.partition(":")
        if separator and name in HEADER:
            header[name] = rest.strip()
        elif header and line.strip():
            header[next(reversed(header))] += " " + line.strip()
    missing = [name for name in HEADER if not header.get(name)]
    if missing:
        raise InvalidInput(
            f"the header of {path} does not state {', '.join(missing)}; every recipe states {', '.join(HEADER)}."
        )
    return header
