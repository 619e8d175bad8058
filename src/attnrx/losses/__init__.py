"""Terms of the training objective, to be combined freely."""

from attnrx.losses.distillation import Distillation
from attnrx.losses.feature_distillation import FeatureDistillation
from attnrx.losses.fusion_ownership import FusionOwnership
from attnrx.losses.loss import Loss, LossContext
from attnrx.losses.perturbation import PerturbationRobustness
from attnrx.losses.target_rank import TargetRank
from attnrx.losses.task import Task

LOSSES: tuple[type[Loss], ...] = (
    Distillation,
    FeatureDistillation,
    FusionOwnership,
    PerturbationRobustness,
    TargetRank,
    Task,
)

__all__ = [
    "LOSSES",
    "Distillation",
    "FeatureDistillation",
    "FusionOwnership",
    "Loss",
    "LossContext",
    "PerturbationRobustness",
    "TargetRank",
    "Task",
]
