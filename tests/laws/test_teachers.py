"""A run learns from the teacher that is in the folder when it begins, and is resumed with that teacher only."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Distillation, FeatureDistillation, LossContext
from attnrx_lab.papers.similarity import TokenSimilarity
from attnrx_lab.vision_transformer import VisionTransformer, initialize_
from support.cases import CONFIGS, images, model
from support.tiny_runs import MODEL, at, config, splits
from support.tiny_runs import model as student


def teacher(seed: int) -> nn.Module:
    return initialize_(VisionTransformer(MODEL), seed, strength=4.0).eval()


def learning(folder: Path) -> TrainingConfig:
    return config(losses=(Distillation(str(folder), weight=1.0),), ema=None)


def trained(folder: Path, run: Path) -> list[torch.Tensor]:
    made = train(student(), splits(), learning(folder), run)
    return [parameter.detach().clone() for parameter in made.model.parameters()]


def test_a_new_teacher_in_the_same_folder_is_used(tmp_path: Path) -> None:
    results = []
    for seed in (1, 2):
        rx.save(teacher(seed), tmp_path / "teacher")
        results.append(trained(tmp_path / "teacher", tmp_path / f"run-{seed}"))
    rx.save(teacher(2), tmp_path / "other")
    expected = trained(tmp_path / "other", tmp_path / "expected")
    assert all(torch.equal(*pair) for pair in zip(results[1], expected, strict=True))
    assert not all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_run_is_not_resumed_with_another_teacher(tmp_path: Path) -> None:
    rx.save(teacher(1), tmp_path / "teacher")
    trained(tmp_path / "teacher", tmp_path / "run")
    rx.save(teacher(1), tmp_path / "teacher")
    trained(tmp_path / "teacher", tmp_path / "run")  # equal weights, written again
    rx.save(teacher(2), tmp_path / "teacher")
    with pytest.raises(CheckpointError, match=r"holds another run: teachers\.teacher \(\w{8}\) was"):
        trained(tmp_path / "teacher", tmp_path / "run")


def test_a_teacher_that_is_replaced_during_the_run_is_not_read_again(tmp_path: Path) -> None:
    rx.save(teacher(1), tmp_path / "teacher")
    expected = trained(tmp_path / "teacher", tmp_path / "expected")

    def replace() -> None:
        rx.save(teacher(2), tmp_path / "teacher")

    with at(2, replace):
        made = train(student(), splits(), learning(tmp_path / "teacher"), tmp_path / "run")
    assert all(torch.equal(*pair) for pair in zip(made.model.parameters(), expected, strict=True))


def test_a_loss_outside_of_a_run_reads_a_replaced_teacher_again(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    values = []
    for strength in (1.0, 4.0):
        rx.save(initialize_(model(CONFIGS["svda"]), 1, strength), tmp_path / "teacher")
        context = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
        values.append(Distillation(str(tmp_path / "teacher"))(context).item())
    assert values[0] != values[1]


@pytest.fixture
def untyped() -> Iterator[None]:
    """Turns the type checks of the tests off, which a user's code does not have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("loss", [Distillation, FeatureDistillation, TokenSimilarity])
def test_a_module_is_no_teacher(loss: type, untyped: None) -> None:
    with pytest.raises(InvalidInput, match="was given a VisionTransformer: give the folder") as error:
        loss(teacher=teacher(1), weight=-1.0)
    assert len(str(error.value)) < 300


def test_a_path_is_a_teacher(tmp_path: Path, untyped: None) -> None:
    assert Distillation(tmp_path) == Distillation(str(tmp_path))  # type: ignore[arg-type]
