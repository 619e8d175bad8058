"""Terms of the training objective, which can be combined freely."""

from attnrx.losses.loss import Loss, LossContext, Task
from attnrx.losses.penalties import FusionOwnership, KeepRatio, PerturbationRobustness, TargetRank
from attnrx.losses.teaching import Distillation, FeatureDistillation, TokenSimilarity

LOSSES: tuple[type[Loss], ...] = (
    Distillation,
    FeatureDistillation,
    FusionOwnership,
    KeepRatio,
    PerturbationRobustness,
    TargetRank,
    Task,
    TokenSimilarity,
)

__all__ = [
    "LOSSES",
    "Distillation",
    "FeatureDistillation",
    "FusionOwnership",
    "KeepRatio",
    "Loss",
    "LossContext",
    "PerturbationRobustness",
    "TargetRank",
    "Task",
    "TokenSimilarity",
]
