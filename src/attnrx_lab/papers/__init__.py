"""The tables and figures of the papers: runs from training to numbers, with the printed ones."""

from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.fusion_experiment import FusionExperiment, FusionRun
from attnrx_lab.papers.irratt_experiment import IrrattExperiment, IrrattRun
from attnrx_lab.papers.irratt_methods import IrrattMethod
from attnrx_lab.papers.recipe import load_recipe, recipe_names
from attnrx_lab.papers.reproduce import Request, reproduce
from attnrx_lab.papers.spot_experiment import SpotExperiment, SpotRun
from attnrx_lab.papers.spot_methods import TokenMethod
from attnrx_lab.papers.spot_speed import SpeedExperiment, SpeedRun
from attnrx_lab.papers.spot_transfer import SpotTransferExperiment, SpotTransferRun
from attnrx_lab.papers.svda import run_svda, spread_over_epochs
from attnrx_lab.papers.svda_experiment import SvdaExperiment, SvdaRun
from attnrx_lab.papers.table import ReproducedTable, make_table

__all__ = [
    "Experiment",
    "FusionExperiment",
    "FusionRun",
    "IrrattExperiment",
    "IrrattMethod",
    "IrrattRun",
    "ReproducedTable",
    "Request",
    "Run",
    "SpeedExperiment",
    "SpeedRun",
    "SpotExperiment",
    "SpotRun",
    "SpotTransferExperiment",
    "SpotTransferRun",
    "SvdaExperiment",
    "SvdaRun",
    "TokenMethod",
    "load_recipe",
    "make_table",
    "recipe_names",
    "reproduce",
    "run_svda",
    "spread_over_epochs",
]
