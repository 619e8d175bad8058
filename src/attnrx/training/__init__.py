"""Training on one or several processes, with exact resume."""

from attnrx.training.config import Mixing, TrainingConfig
from attnrx.training.reporters import Console, Reporter
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "Console",
    "Mixing",
    "Reporter",
    "TrainingConfig",
    "TrainingRun",
    "train",
]
