"""Experiments: whole runs. The demo, and the tables of the papers from training to numbers."""

from attnrx.experiments.comparing import (
    COMPARISON_COLUMNS,
    DIFFERENCE_COLUMNS,
    Trial,
    Trials,
    Unreached,
    compare_contenders,
)
from attnrx.experiments.contenders import Bench, Contender
from attnrx.experiments.demo import DemoResult, demo
from attnrx.experiments.experiment import Experiment, Run
from attnrx.experiments.fusion_experiment import FusionExperiment, FusionRun
from attnrx.experiments.irratt_experiment import IrrattExperiment, IrrattRun
from attnrx.experiments.irratt_methods import Method
from attnrx.experiments.recipe import load_recipe, recipe_names
from attnrx.experiments.reproduce import Request, reproduce
from attnrx.experiments.speeds import SPEED_COLUMNS, Rates, Speed, Speeds, compare_speeds, noise_bench
from attnrx.experiments.spot_experiment import SpotExperiment, SpotRun
from attnrx.experiments.spot_methods import TokenMethod
from attnrx.experiments.spot_speed import SpeedExperiment, SpeedRun
from attnrx.experiments.spot_transfer import SpotTransferExperiment, SpotTransferRun
from attnrx.experiments.spread import spread_over_epochs
from attnrx.experiments.svda import run_svda
from attnrx.experiments.svda_experiment import SvdaExperiment, SvdaRun
from attnrx.experiments.table import ReproducedTable, make_table

__all__ = [
    "COMPARISON_COLUMNS",
    "DIFFERENCE_COLUMNS",
    "SPEED_COLUMNS",
    "Bench",
    "Contender",
    "DemoResult",
    "Experiment",
    "FusionExperiment",
    "FusionRun",
    "IrrattExperiment",
    "IrrattRun",
    "Method",
    "Rates",
    "ReproducedTable",
    "Request",
    "Run",
    "Speed",
    "SpeedExperiment",
    "SpeedRun",
    "Speeds",
    "SpotExperiment",
    "SpotRun",
    "SpotTransferExperiment",
    "SpotTransferRun",
    "SvdaExperiment",
    "SvdaRun",
    "TokenMethod",
    "Trial",
    "Trials",
    "Unreached",
    "compare_contenders",
    "compare_speeds",
    "demo",
    "load_recipe",
    "make_table",
    "noise_bench",
    "recipe_names",
    "reproduce",
    "run_svda",
    "spread_over_epochs",
]
