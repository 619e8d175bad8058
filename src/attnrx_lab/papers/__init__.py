"""The tables and figures of the papers: runs from training to numbers, with the printed ones."""

from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.fusion import FusionExperiment
from attnrx_lab.papers.irratt import IrrattExperiment, IrrattMethod
from attnrx_lab.papers.recipe import load_recipe, recipe_names
from attnrx_lab.papers.reproduce import Request, reproduce
from attnrx_lab.papers.spot import SpotExperiment, TokenMethod
from attnrx_lab.papers.spot_speed import SpeedExperiment
from attnrx_lab.papers.spot_transfer import SpotTransferExperiment
from attnrx_lab.papers.svda import SvdaExperiment, spread_over_epochs
from attnrx_lab.papers.table import ReproducedTable, make_table

__all__ = [
    "Experiment",
    "FusionExperiment",
    "IrrattExperiment",
    "IrrattMethod",
    "ReproducedTable",
    "Request",
    "Run",
    "SpeedExperiment",
    "SpotExperiment",
    "SpotTransferExperiment",
    "SvdaExperiment",
    "TokenMethod",
    "load_recipe",
    "make_table",
    "recipe_names",
    "reproduce",
    "spread_over_epochs",
]
