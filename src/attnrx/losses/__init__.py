"""Terms of the training objective, which can be combined freely."""

from attnrx.losses.distillation import Distillation
from attnrx.losses.feature_distillation import FeatureDistillation
from attnrx.losses.fusion_ownership import FusionOwnership
from attnrx.losses.keep_ratio import KeepRatio
from attnrx.losses.loss import Loss, LossContext
from attnrx.losses.perturbation import PerturbationRobustness
from attnrx.losses.target_rank import TargetRank
from attnrx.losses.task import Task
from attnrx.losses.token_similarity import TokenSimilarity

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
