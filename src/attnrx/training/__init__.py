"""Training on one process or many, with exact resume."""

from attnrx.training.config import TrainingConfig
from attnrx.training.reporters import PlainLines, ProgressBars, Reporter, Silent, default_reporter
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "PlainLines",
    "ProgressBars",
    "Reporter",
    "Silent",
    "TrainingConfig",
    "TrainingRun",
    "default_reporter",
    "train",
]
