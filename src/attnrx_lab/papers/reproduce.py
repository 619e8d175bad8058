"""Reproduces the tables of papers: trains and measures the models, and adds the papers' numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from attnrx.support.errors import UnknownName
from attnrx.support.progress import Log, no_log
from attnrx_lab.papers import irratt_tables, spot_tables, svda_tables
from attnrx_lab.papers.experiment import Experiment
from attnrx_lab.papers.plan import PlannedRun, RecipePlan
from attnrx_lab.papers.processes import is_first
from attnrx_lab.papers.recipe import Expected, Recipe
from attnrx_lab.papers.table import ReproducedTable, make_table

PAPERS = {"irratt": irratt_tables, "spot": spot_tables, "svda": svda_tables}


def recipe_names() -> tuple[str, ...]:
    """Returns the names of all recipes, e.g. `svda/table1`."""
    return tuple(sorted(f"{paper}/{table}" for paper, module in PAPERS.items() for table in module.RECIPES))


def load_recipe(name: str) -> Recipe:
    """Returns a recipe with its name, its paper and the printed numbers.

    Raises:
        UnknownName: There is no such recipe.
    """
    if name not in recipe_names():
        raise UnknownName("recipe", name, recipe_names())
    paper, _, table = name.partition("/")
    printed = json.loads(Path(__file__).with_name(f"{paper}.json").read_text(encoding="utf-8")).get(table, {})
    expected = {row: {column: Expected.of(text) for column, text in cells.items()} for row, cells in printed.items()}
    module = PAPERS[paper]
    return replace(module.RECIPES[table], name=name, paper=module.PAPER, expected=expected)


def reproduce(
    names: str | Sequence[str],
    *,
    only: str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tiny: bool = False,
    folder: str | Path = "runs",
    log: Log = no_log,
    **knobs: Any,
) -> tuple[ReproducedTable, ...]:
    """Trains and measures the models that recipes need, and writes tables that list all differences from the paper.

    Runs are stored in `FOLDER/KIND/SCENARIO/seed-SEED`. All recipes share these runs, and a later call continues
    interrupted runs. Each recipe measures only the numbers of its own table. Several calls may use one folder at the
    same time. If one call is working on a run, other calls wait for it. Processes that one launcher (`torchrun`,
    `accelerate launch`) starts share the work of each run. A table is saved as NAME.json and NAME.md in the folder.

    Args:
        names: One or several recipes, e.g. "svda/table1".
        only: The scenarios to run, in this order, e.g. datasets for the tables of SVDA. Each scenario must belong to at
            least one of the recipes. By default, all scenarios run.
        seeds: Seeds that replace the recipes' seeds.
        tiny: Whether to train small models for a few steps, as a quick test of the code.
        folder: The folder in which runs and tables are stored.
        log: A function that is called with progress messages.
        **knobs: Settings of the protocols, as listed in each experiment's `knobs`. None keeps the default.

    Returns:
        The tables in the order of `names`. Tables without any of the scenarios in `only` are omitted.

    Raises:
        UnknownName: There is no such recipe, or no recipe has such a scenario.
        InvalidInput: An experiment has no such setting.
        CheckpointError: The folder of a run contains another run.
        TrainingInterrupted: Ctrl-C stopped a training. To continue, call again with the same arguments.
    """
    recipes, requested = _requested(names, only)
    changes, tables = {knob: value for knob, value in knobs.items() if value is not None}, []
    for recipe in recipes:
        experiments, deviations = _planned(recipe, requested, seeds, tiny, changes)
        runs = [each.run(Path(folder) / each.place, log, recipe.keys(each.scenario)) for each in experiments]
        if runs:
            # Exact quantities are compared with the paper unless the model was changed.
            tables.append(make_table(recipe, runs, deviations, same_shapes="model" not in changes))
            if is_first():
                tables[-1].save(folder)
    return tuple(tables)


def plan_recipes(
    names: str | Sequence[str],
    *,
    only: str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tiny: bool = False,
    folder: str | Path = "runs",
    **knobs: Any,
) -> RecipePlan:
    """Returns the trainings that `reproduce` would run with these arguments, and how long they would take on one H100.

    The function does not load, train or write anything.

    Raises:
        UnknownName: There is no such recipe, or no recipe has such a scenario.
        InvalidInput: An experiment has no such setting.
    """
    recipes, requested = _requested(names, only)
    changes = {knob: value for knob, value in knobs.items() if value is not None}
    experiments: list[Experiment] = []
    texts: list[str] = []
    for recipe in recipes:
        planned, deviations = _planned(recipe, requested, seeds, tiny, changes)
        experiments += planned
        texts += chain.from_iterable(deviations.values())
    runs = _planned_runs(experiments, Path(folder))
    return RecipePlan(tuple(recipe.name for recipe in recipes), runs, tuple(dict.fromkeys(texts)))


def _requested(names: str | Sequence[str], only: str | Sequence[str] | None) -> tuple[list[Recipe], tuple[str, ...]]:
    """Returns the recipes, and the scenarios in `only` or, if `only` is None, all their scenarios.

    Raises:
        UnknownName: There is no such recipe, or no recipe has such a scenario.
    """
    names = (names,) if isinstance(names, str) else names
    recipes = [load_recipe(name) for name in names]
    # A recipe may contain several runs of a scenario, and several recipes may contain the same scenario.
    scenarios = list(dict.fromkeys(protocol.scenario for recipe in recipes for protocol in recipe.protocol))
    requested = (only,) if isinstance(only, str) else tuple(dict.fromkeys(only or scenarios))
    for scenario in requested:
        if scenario not in scenarios:
            raise UnknownName(f"scenario of the recipe {', '.join(names)}", scenario, scenarios)
    return recipes, requested


def _planned(
    recipe: Recipe, requested: Sequence[str], seeds: Sequence[int] | None, tiny: bool, changes: Mapping[str, Any]
) -> tuple[list[Experiment], dict[str, list[str]]]:
    """Returns the experiments of a table in the order of the scenarios, and their deviations from the paper."""
    experiments: list[Experiment] = []
    deviations: dict[str, list[str]] = {}
    drawn = tuple(dict.fromkeys(seeds or recipe.seeds))
    for scenario in requested:
        for protocol in recipe.protocol:
            for seed in drawn if protocol.scenario == scenario else ():
                seeded = protocol.seeded(seed)
                # Changes come last, so that they also apply to a tiny run.
                experiments.append((seeded.as_tiny() if tiny else seeded).changed(changes))
                deviations.setdefault(scenario, []).extend(experiments[-1].deviations(protocol))
        # Seeds are not a knob of an experiment. Their order does not matter, but a different set is a deviation.
        if scenario in deviations and set(drawn) != set(recipe.seeds):
            texts = [", ".join(map(str, each)) for each in (sorted(drawn), recipe.seeds)]
            deviations[scenario].append(f"{scenario}: seeds {texts[0]} instead of {texts[1]}")
    return experiments, deviations


def _planned_runs(experiments: Sequence[Experiment], folder: Path) -> tuple[PlannedRun, ...]:
    """Returns the runs of the experiments, in order and without duplicates."""
    runs = (
        PlannedRun(each.name, each.place.as_posix(), each.trainings(), (folder / each.place / "result.json").exists())
        for each in experiments
    )
    return tuple({run.place: run for run in runs}.values())
