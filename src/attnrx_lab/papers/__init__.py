"""Reproduces tables and figures of papers, and compares the results with the printed numbers."""

from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.plan import RecipePlan
from attnrx_lab.papers.reproduce import load_recipe, plan_recipes, recipe_names, reproduce
from attnrx_lab.papers.table import ReproducedTable, make_table

__all__ = [
    "Experiment",
    "RecipePlan",
    "ReproducedTable",
    "Run",
    "load_recipe",
    "make_table",
    "plan_recipes",
    "recipe_names",
    "reproduce",
]
