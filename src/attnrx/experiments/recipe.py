"""Recipes: which table of which paper, from which runs, beside which numbers; and where recipes are found."""

import ast
import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrx.errors import InvalidInput, UnknownName
from attnrx.experiments.experiment import Experiment, Run

# What the docstring of every recipe states, one "Name: text" paragraph each.
HEADER = ("Paper", "Table", "Command", "Expected", "Tolerance", "Time", "Hardware")


@dataclass(frozen=True)
class Row:
    """One line of a table: what one rule did in one scenario; without a rule, what the paper printed and no more."""

    label: str
    scenario: str
    rule: str | None = None


@dataclass(frozen=True)
class Column:
    """One quantity of one realization, times `factor`: papers do not all count a loss as negative.

    `decimals=None` writes three significant digits.
    """

    key: str
    title: str
    kind: str
    quantity: str
    unit: str = ""
    decimals: int | None = 2
    factor: float = 1.0


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
    """What the paper printed, as a number, and how far from it a reproduction may be."""

    paper: float
    tolerance: float
    printed: str


@dataclass(frozen=True)
class RecipeFile:
    """A recipe as it was found: its name, its header, and the paper's numbers by row label and column key."""

    name: str
    path: Path
    header: Mapping[str, str]
    recipe: Recipe
    expected: Mapping[str, Mapping[str, Expected]]


def recipe_names() -> tuple[str, ...]:
    """Names every recipe that can be reproduced, e.g. `svda/table1`."""
    root = recipes_folder()
    return tuple(sorted(f"{path.parent.name}/{path.stem}" for path in root.glob("*/*.py")))


def load_recipe(name: str) -> RecipeFile:
    """Finds a recipe by its name and reads it with its header and its expected numbers."""
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    path = recipes_folder() / f"{name}.py"
    return RecipeFile(name, path, read_header(path), _recipe_in(path, name), _expected(path))


def recipes_folder() -> Path:
    """Finds the recipes: in the working folder, beside the package in a checkout, or inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    places = (Path("recipes"), package.parents[1] / "recipes", package / "recipes")
    for place in places:
        if any(place.glob("*/expected.json")):
            return place
    raise InvalidInput(
        f"no recipes were found in {', '.join(map(str, places))}; run this in a checkout of attnrx, or install attnrx "
        "again: its recipes are missing."
    )


def read_header(path: Path) -> dict[str, str]:
    """Reads the header of a recipe from its docstring, without running it, or says what is missing in it."""
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


def _recipe_in(path: Path, name: str) -> Recipe:
    """Runs the recipe's file, which is plain data, and takes its RECIPE."""
    found: Any = runpy.run_path(str(path)).get("RECIPE")
    if not isinstance(found, Recipe):
        raise InvalidInput(f"the recipe {name} ({path}) does not define RECIPE, a Recipe; look at its neighbours.")
    return found


def _expected(path: Path) -> dict[str, dict[str, Expected]]:
    tables = json.loads((path.parent / "expected.json").read_text(encoding="utf-8"))
    return {
        row: {column: Expected(**cell) for column, cell in cells.items()}
        for row, cells in tables.get(path.stem, {}).items()
    }
