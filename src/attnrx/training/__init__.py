"""Training on one or several processes, with exact resume."""

from attnrx.support.plugins import moved
from attnrx.training.config import TrainingConfig
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "TrainingConfig",
    "TrainingRun",
    "train",
]

__getattr__ = moved({"Mixing": "attnrx.losses.Distillation", "Reporter": "attnrx.train(..., log=...)"})
