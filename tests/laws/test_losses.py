"""Laws of every loss: the mean over two processes is the loss of one, gradients too; knobs survive a dictionary."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attnrx.config import from_dict, to_dict
from attnrx.errors import InvalidInput, NotSupported
from attnrx.losses import LOSSES as KINDS
from attnrx.losses import Distillation, Loss, LossContext, PerturbationRobustness, TargetRank, Task
from attnrx.models import save_model
from cases import CONFIGS, LOSSES, images, model

NAMES = [*LOSSES, "distillation"]


@pytest.fixture
def losses(tmp_path: Path) -> dict[str, Loss]:
    teacher = model(CONFIGS["dense"], seed=9)
    teacher.config = replace(teacher.config, mean=(0.4,), std=(0.3,))
    folder = save_model(tmp_path / "teacher", teacher)
    return {**LOSSES, "distillation": Distillation(str(folder), temperature=2.0)}


def test_every_kind_of_loss_is_in_the_case_table(losses: dict[str, Loss]) -> None:
    assert {type(loss) for loss in losses.values()} == set(KINDS)


def contexts() -> tuple[LossContext, list[LossContext]]:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"], 6)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    halves = [
        LossContext(vit, part, given, vit(part), seed=4, shard=(process, 2))
        for process, (part, given) in enumerate(zip(inputs.chunk(2), labels.chunk(2), strict=True))
    ]
    return LossContext(vit, inputs, labels, vit(inputs), seed=4), halves


def gradient(context: LossContext, value: torch.Tensor) -> torch.Tensor:
    parameters = list(context.model.parameters())
    slopes = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if s is None else s.flatten() for p, s in zip(parameters, slopes, strict=True)]
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_equal_one(name: str, losses: dict[str, Loss]) -> None:
    whole, halves = contexts()
    value = losses[name](whole)
    shared = torch.stack([losses[name](half) for half in halves]).mean()
    torch.testing.assert_close(shared, value, rtol=1e-12, atol=1e-14)
    slope = gradient(whole, value)
    assert slope.abs().max() > 0
    torch.testing.assert_close(gradient(halves[0], shared), slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_knobs_survive_a_dictionary(name: str, losses: dict[str, Loss]) -> None:
    assert from_dict(to_dict(losses[name]), KINDS) == losses[name]


def test_a_model_learns_nothing_from_itself(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    folder = save_model(tmp_path, vit)
    given = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
    assert Distillation(str(folder), temperature=3.0)(given).item() == pytest.approx(0, abs=1e-12)


def test_a_teacher_sees_the_images_on_its_own_scale(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    twin = model(CONFIGS["svda"])
    twin.config = replace(twin.config, mean=(0.1,), std=(2.0,))
    folder = save_model(tmp_path, twin)
    given = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
    assert Distillation(str(folder))(given).item() > 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: Task(label_smoothing=1.0),
        lambda: Task(weight=0.0),
        lambda: TargetRank(0.5),
        lambda: PerturbationRobustness(scale=-1.0),
        lambda: Distillation("teacher", temperature=float("nan")),
    ],
)
def test_knobs_out_of_range_are_refused(make) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_a_model_without_strengths_has_no_target_rank() -> None:
    vit, inputs = model(CONFIGS["dense"]), images(CONFIGS["dense"])
    given = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
    with pytest.raises(NotSupported, match="SVDA"):
        TargetRank(2.0)(given)


def test_a_teacher_of_another_task_is_refused(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    folder = save_model(tmp_path, model(replace(CONFIGS["svda"], classes=4)))
    given = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
    with pytest.raises(InvalidInput, match="4 classes and the model with 3"):
        Distillation(str(folder))(given)
