"""Trains models in one or several processes, and can resume an interrupted run exactly where it stopped."""

from typing import TYPE_CHECKING, Any

from attnrx.training.config import TrainingConfig

if TYPE_CHECKING:
    from attnrx.training.trainer import TrainingRun, train

__all__ = ["TrainingConfig", "TrainingRun", "train"]


def __getattr__(name: str) -> Any:
    # These names are imported on first use. The trainer imports torch.distributed, and some users only need the losses.
    if name in ("TrainingRun", "train"):
        from attnrx.training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"attnrx.training has no attribute {name!r}.")
