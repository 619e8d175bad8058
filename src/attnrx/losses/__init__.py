"""Terms of the training objective, which can be combined freely."""

from attnrx.losses.exits import MultiExit
from attnrx.losses.halting import HaltingPrior, Ponder
from attnrx.losses.loss import Loss, LossContext, Task, TeacherSource
from attnrx.losses.penalties import FusionOwnership, KeepRatio, PerturbationRobustness, TargetRank
from attnrx.losses.reinforcement import PolicyGradient
from attnrx.losses.teaching import Distillation, FeatureDistillation, TokenSimilarity, load_teachers

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
