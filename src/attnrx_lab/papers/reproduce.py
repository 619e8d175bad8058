"""Makes the table of a recipe: every run it needs, trained and measured, with the paper's numbers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnrx.support.errors import UnknownName
from attnrx.support.progress import Log, no_log
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
    seeds = tuple(dict.fromkeys(seeds or recipe.seeds))  # each once, in the given order
    changes = {knob: value for knob, value in knobs.items() if value is not None}
    experiments = []
    deviations: dict[str, list[str]] = {}
    for protocol in _chosen(recipe, only):
        for seed in seeds:
            seeded = protocol.seeded(seed)
            # Changes last, so that they also apply to a tiny run.
            experiments.append((seeded.as_tiny() if tiny else seeded).changed(changes))
            deviations.setdefault(protocol.scenario, []).extend(experiments[-1].deviations(protocol))
    # Seeds are no knob of an experiment: the order does not matter, another set does.
    if set(seeds) != set(recipe.seeds):
        other = f"seeds {', '.join(map(str, sorted(seeds)))} instead of {', '.join(map(str, recipe.seeds))}"
        for texts in deviations.values():
            texts.append(other)
    runs = [each.run(Path(folder) / each.place, log, recipe.keys(each.scenario)) for each in experiments]
    # Exact quantities are compared with the paper whatever else was changed, but not those of another model.
    table = make_table(recipe, runs, deviations, same_shapes="model" not in changes)
    table.save(folder)
    return table


def _chosen(recipe: Recipe, only: str | Sequence[str] | None) -> list[Any]:
    scenarios = list(dict.fromkeys(protocol.scenario for protocol in recipe.protocol))  # one may have several runs
    requested = (only,) if isinstance(only, str) else only or scenarios
    for scenario in requested:
        if scenario not in scenarios:
            raise UnknownName(f"scenario of the recipe {recipe.name}", scenario, scenarios)
    return [protocol for protocol in recipe.protocol if protocol.scenario in requested]
