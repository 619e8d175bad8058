"""Terms of the training objective, which can be combined freely."""

from attnrx.training.losses.exits import MultiExit
from attnrx.training.losses.halting import HaltingPrior, Ponder
from attnrx.training.losses.loss import Loss, LossContext, Task, TeacherSource
from attnrx.training.losses.penalties import FusionOwnership, KeepRatio, PerturbationRobustness, TargetRank
from attnrx.training.losses.reinforcement import PolicyGradient
from attnrx.training.losses.teaching import Distillation, FeatureDistillation, TokenSimilarity, load_teachers

LOSSES: tuple[type[Loss], ...] = (
    Distillation,
    FeatureDistillation,
    FusionOwnership,
    HaltingPrior,
    KeepRatio,
    MultiExit,
    PerturbationRobustness,
    PolicyGradient,
    Ponder,
    TargetRank,
    Task,
    TokenSimilarity,
)

__all__ = [
    "LOSSES",
    "Distillation",
    "FeatureDistillation",
    "FusionOwnership",
    "HaltingPrior",
    "KeepRatio",
    "Loss",
    "LossContext",
    "MultiExit",
    "PerturbationRobustness",
    "PolicyGradient",
    "Ponder",
    "TargetRank",
    "Task",
    "TeacherSource",
    "TokenSimilarity",
    "load_teachers",
]
