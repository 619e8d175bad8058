"""Laws of every loss: the mean over two processes is the loss of one, gradients too; knobs survive a dictionary."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnrx as rx
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.training.losses import Distillation, FeatureDistillation, Loss, LossContext
from attnrx.vit.models import family_of, recording_blocks, save_model
from attnrx_lab.papers.similarity import TokenSimilarity
from attnrx_lab.tokens import KeepRatio
from support.cases import CONFIGS, LOSSES, images, model

NAMES = [*LOSSES, "distillation", "feature_distillation"]
KINDS = tuple(rx.losses.LOSSES.values())


@pytest.fixture
def losses(tmp_path: Path) -> dict[str, Loss]:
    teacher = model(CONFIGS["dense"], seed=9)
    teacher.config = replace(teacher.config, mean=(0.4,), std=(0.3,))
    folder = save_model(tmp_path / "teacher", teacher)
    own = {"distillation": Distillation(str(folder), temperature=2.0)}
    return {**LOSSES, **own, "feature_distillation": FeatureDistillation(str(folder), last=2)}


def test_every_kind_of_loss_is_in_the_case_table(losses: dict[str, Loss]) -> None:
    # Those that need pruned tokens: test_token_training.py.
    elsewhere = {KeepRatio}
    assert {type(loss) for loss in losses.values()} == set(KINDS) - elsewhere


def contexts() -> tuple[LossContext, list[LossContext]]:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"], 6)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    halves = [
        context(vit, part, given, shard=(process, 2))
        for process, (part, given) in enumerate(zip(inputs.chunk(2), labels.chunk(2), strict=True))
    ]
    return context(vit, inputs, labels), halves


def context(vit, inputs: torch.Tensor, labels: torch.Tensor, **more) -> LossContext:
    with recording_blocks(vit, family_of(vit)) as features:
        logits = vit(inputs)
    return LossContext(vit, inputs, labels, logits, seed=4, features=tuple(features), **more)


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


def test_a_model_learns_nothing_from_itself(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    folder = save_model(tmp_path, vit)
    given = context(vit, inputs, torch.zeros(5, dtype=torch.long))
    assert Distillation(str(folder), temperature=3.0)(given).item() == pytest.approx(0, abs=1e-12)
    assert FeatureDistillation(str(folder))(given).item() == 0


def test_a_teacher_sees_the_images_on_its_own_scale(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    twin = model(CONFIGS["svda"])
    twin.config = replace(twin.config, mean=(0.1,), std=(2.0,))
    folder = save_model(tmp_path, twin)
    given = LossContext(vit, inputs, torch.zeros(5, dtype=torch.long), vit(inputs), seed=0)
    assert Distillation(str(folder))(given).item() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_teaches_an_ordinary_model_something_or_is_refused_by_name(kind: type[Loss], losses) -> None:
    """An ordinary model has no strengths, no shared directions and no token policy."""
    vit, inputs = model(CONFIGS["dense"]), images(CONFIGS["dense"])
    given = context(vit, inputs, torch.tensor([0, 1, 2, 1, 0]))
    loss = next((each for each in losses.values() if type(each) is kind), None) or kind(
        *["dense:digits"][: kind is TokenSimilarity]
    )
    try:
        value = loss(given)
    except (NotSupported, InvalidInput) as error:
        # Halting and sampling losses name themselves; that of another reducer too.
        assert kind.__name__ in str(error)
    else:
        assert gradient(given, value).abs().max() > 0


def test_features_are_those_of_the_last_blocks(tmp_path: Path) -> None:
    vit, inputs = model(CONFIGS["svda"]), images(CONFIGS["svda"])
    teacher = model(CONFIGS["svda"], seed=9)
    folder = str(save_model(tmp_path, teacher))
    given = context(vit, inputs, torch.zeros(5, dtype=torch.long))
    with recording_blocks(teacher, family_of(teacher)) as theirs:
        teacher(inputs)
    whitened = [
        [(t - t.mean(-1, keepdim=True)) / (t.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for t in tokens]
        for tokens in (given.features, theirs)
    ]
    each = [(a - b).square().mean().item() for a, b in zip(*whitened, strict=True)]
    assert len(set(each)) == len(each) > 1
    assert FeatureDistillation(folder)(given).item() == pytest.approx(sum(each) / len(each), rel=1e-10)
    assert FeatureDistillation(folder, last=1)(given).item() == pytest.approx(each[-1], rel=1e-10)
    with pytest.raises(InvalidInput, match="blocks only"):
        FeatureDistillation(folder, last=len(each) + 1)(given)
