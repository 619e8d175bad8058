"""Makes the table of a recipe: every run it needs, trained and measured, with the paper's numbers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnrx.errors import UnknownName
from attnrx.progress import Log, no_log
from attnrx_lab.papers import irratt_tables, spot_tables, svda_tables
from attnrx_lab.papers.recipe import Expected, Recipe
from attnrx_lab.papers.table import ReproducedTable, make_table

PAPERS = {"irratt": irratt_tables, "spot": spot_tables, "svda": svda_tables}


def recipe_names() -> tuple[str, ...]:
    """Returns the names of all recipes, e.g. `svda/table1`."""
    return tuple(sorted(f"{paper}/{table}" for paper, module in PAPERS.items() for table in module.RECIPES))


def load_recipe(name: str) -> Recipe:
    """Returns a recipe with its name, its paper and the printed numbers."""
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    paper, _, table = name.partition("/")
    printed = json.loads(Path(__file__).with_name(f"{paper}.json").read_text(encoding="utf-8")).get(table, {})
    expected = {row: {column: Expected.of(text) for column, text in cells.items()} for row, cells in printed.items()}
    module = PAPERS[paper]
    return replace(module.RECIPES[table], name=name, paper=module.PAPER, expected=expected)


def reproduce(
    name: str,
    *,
    only: str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tiny: bool = False,
    folder: str | Path = "runs",
    log: Log = no_log,
    **knobs: Any,
) -> ReproducedTable:
    """Makes a recipe's table, training where necessary; every difference from the paper is listed in the table.

    `only` names one scenario or several (a dataset, for the tables of SVDA). `seeds` replace the recipe's, and `knobs`
    the settings of its protocol: each experiment lists its own, None means unchanged. Runs are stored in
    `FOLDER/KIND/SCENARIO/seed-SEED`, are shared by all recipes, and continue after an interruption; each recipe
    measures the numbers of its own table. Several processes may work in one folder. The table is saved as NAME.json
    and NAME.md in the folder.
    """
    recipe = load_recipe(name)
    seeds = tuple(dict.fromkeys(seeds or recipe.seeds))
    changes = {knob: value for knob, value in knobs.items() if value is not None}
    wanted = []
    deviations: dict[str, list[str]] = {}
    for protocol in _chosen(recipe, only):
        for seed in seeds:
            own = protocol.seeded(seed)
            wanted.append((own.as_tiny() if tiny else own).changed(changes))
            deviations.setdefault(protocol.scenario, []).extend(wanted[-1].deviations(protocol))
    if set(seeds) != set(recipe.seeds):
        other = f"seeds {', '.join(map(str, sorted(seeds)))} instead of {', '.join(map(str, recipe.seeds))}"
        for texts in deviations.values():
            texts.append(other)
    runs = [each.run(Path(folder) / each.place, log, recipe.keys(each.scenario)) for each in wanted]
    table = make_table(recipe, runs, deviations, same_shapes="model" not in changes)
    table.save(folder)
    return table


def _chosen(recipe: Recipe, only: str | Sequence[str] | None) -> list[Any]:
    known = [protocol.scenario for protocol in recipe.protocol]
    wanted = (only,) if isinstance(only, str) else only or known
    for scenario in wanted:
        if scenario not in known:
            raise UnknownName(f"scenario of the recipe {recipe.name}", scenario, known)
    return [protocol for protocol in recipe.protocol if protocol.scenario in wanted]
