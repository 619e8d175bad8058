"""Compares compression methods for one model at equal budgets, by quality on the same images and by latency."""

from attnrx_lab.comparison.comparing import compare_methods, require_comparable
from attnrx_lab.comparison.field import FieldBench, Repeat, Row, about_rows, field_methods, tables_of
from attnrx_lab.comparison.methods import BASELINES, Method, MethodBench, baseline, diagnosed, parse_methods
from attnrx_lab.comparison.record import MethodComparison, MethodTrial
from attnrx_lab.comparison.speeds import SPEED_COLUMNS, Rates, Speed, Speeds, compare_speeds, noise_bench, noise_images
from attnrx_lab.comparison.tasks import TASKS, Task

__all__ = [
    "BASELINES",
    "SPEED_COLUMNS",
    "TASKS",
    "FieldBench",
    "Method",
    "MethodBench",
    "MethodComparison",
    "MethodTrial",
    "Rates",
    "Repeat",
    "Row",
    "Speed",
    "Speeds",
    "Task",
    "about_rows",
    "baseline",
    "compare_methods",
    "compare_speeds",
    "diagnosed",
    "field_methods",
    "noise_bench",
    "noise_images",
    "parse_methods",
    "require_comparable",
    "tables_of",
]
