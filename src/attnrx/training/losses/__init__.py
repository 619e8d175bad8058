"""Terms of the training objective, which can be combined freely."""

from collections.abc import Mapping
from typing import Any

from attnrx.support.text_parsing import Language, TextReader, knobs_of
from attnrx.training.losses.loss import Loss, LossContext, Task, TeacherSource
from attnrx.training.losses.penalties import FusionOwnership, KeepRatio, PerturbationRobustness, TargetRank
from attnrx.training.losses.teaching import Distillation, FeatureDistillation, TokenSimilarity, load_teachers

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
    "TeacherSource",
    "TokenSimilarity",
    "load_teachers",
    "parse_loss",
]


class _Reader(TextReader):
    language = Language("loss", "Losses", "target_rank:16:0.1 or distillation(runs/teacher,temperature=2)", "():,=/")


def parse_loss(text: str, shared: Mapping[str, Any] | None = None) -> Loss:
    """Builds a loss from its text: the name of its class in snake case with knobs, e.g. `target_rank:16:0.1`.

    `shared` are defaults of knobs, which values without a name skip.

    Raises:
        UnknownName: There is no such loss or knob.
        InvalidInput: The text has another form, or lacks a knob.
    """
    reader = _Reader(text)
    name, kind = reader.read_name({each.text_name(): each for each in LOSSES}, "loss")
    defaults = {knob: value for knob, value in (shared or {}).items() if knob in knobs_of(kind)}
    knobs = reader.read_knobs(name, kind, is_short=True, filled=defaults)
    reader.expect("end", "the end")
    return reader.build(name, kind, {**defaults, **knobs})
