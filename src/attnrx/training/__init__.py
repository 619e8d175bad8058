"""Training on one or several processes, with exact resume."""

from attnrx.training.config import Mixing, TrainingConfig
from attnrx.training.reporters import (
    PlainLines,
    ProgressBars,
    Reporter,
    Several,
    Silent,
    TensorBoard,
    default_reporter,
)
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "Mixing",
    "PlainLines",
    "ProgressBars",
    "Reporter",
    "Several",
    "Silent",
    "TensorBoard",
    "TrainingConfig",
    "TrainingRun",
    "default_reporter",
    "train",
]
