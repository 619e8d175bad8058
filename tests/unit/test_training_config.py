"""Training knobs: they survive a dictionary, and impossible ones are refused by name."""

import pytest

from attnrx.data import Augmentation
from attnrx.support.errors import InvalidInput
from attnrx.support.records import from_dict, to_dict
from attnrx.training import TrainingConfig
from attnrx.training.losses import LOSSES, Distillation, Task
from attnrx_lab.perturbation import TargetRank

CONFIGS = (
    TrainingConfig(),
    TrainingConfig(epochs=1, losses=(Task(0.0), TargetRank(8.0), Distillation("teacher")), ema=0.999, compile=True),
    TrainingConfig(augmentation=Augmentation(padding=2, flip=False), gradient_clip=None, strength_init=2.0),
)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_survives_a_dictionary(config: TrainingConfig) -> None:
    assert from_dict(to_dict(config), (TrainingConfig, Augmentation, *LOSSES.values())) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 0),
        ("accumulate", 0),
        ("learning_rate", float("nan")),
        ("warmup_epochs", 80.0),
        ("losses", ()),
        ("losses", (Task(), Task(0.0))),
        ("ema", 1.0),
        ("min_learning_rate", 0.1),
    ],
)
def test_an_impossible_knob_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        TrainingConfig(**{name: value})  # type: ignore[arg-type]


def test_the_warmup_is_five_epochs_but_at_most_a_tenth() -> None:
    assert TrainingConfig(epochs=80).warmup == 5
    assert TrainingConfig(epochs=20).warmup == 2
    assert TrainingConfig(epochs=20, warmup_epochs=0.0).warmup == 0
