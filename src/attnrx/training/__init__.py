"""Training on one or several processes, with exact resume."""

from typing import TYPE_CHECKING, Any

from attnrx.training.config import TrainingConfig

if TYPE_CHECKING:
    from attnrx.training.trainer import TrainingRun, train

__all__ = ["TrainingConfig", "TrainingRun", "train"]


def __getattr__(name: str) -> Any:
    # Imported on first use: rules of the laboratory only need the losses, and the trainer imports torch.distributed.
    if name in ("TrainingRun", "train"):
        from attnrx.training import trainer

        return getattr(trainer, name)
    raise AttributeError(f"attnrx.training has no attribute {name!r}.")
