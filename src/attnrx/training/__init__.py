"""Training on one or several processes, with exact resume."""

from attnrx.training.config import TrainingConfig
from attnrx.training.reporters import Console, Reporter
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "Console",
    "Reporter",
    "TrainingConfig",
    "TrainingRun",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "Mixing":
        raise AttributeError("attnrx.training.Mixing was removed; use attnrx.losses.Distillation (CHANGELOG.md).")
    raise AttributeError(f"attnrx.training has no {name}; it has {', '.join(__all__)}.")
