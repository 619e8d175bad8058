"""Models of other libraries train too: every kind has its blocks, and a teacher can do without labels."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from attnrx.data import Augmentation, Normalization, Splits, from_tensors
from attnrx.support.errors import InvalidInput
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Distillation, FeatureDistillation, Task
from attnrx.vit.models import family_of, load_model, recording_blocks, save_model
from support.pretrained import CASES, adopted_once


@pytest.mark.parametrize("name", CASES)
def test_every_block_is_found_and_gives_its_tokens(name: str) -> None:
    family, _, model = adopted_once(name)
    blocks = family.block_names(model)
    assert len(set(blocks)) == len(family.attention(model)) == 2
    with recording_blocks(model, family) as features, torch.no_grad():
        model(torch.zeros(3, *family.input_shape(model), dtype=torch.float64))
    width = family.attention(model)[0].spec.width
    assert [(len(tokens), tokens.shape[2]) for tokens in features] == [(3, width)] * 2


def splits(model: nn.Module, classes: int = 3, shift: int = 0) -> Splits:
    scale = Normalization(*family_of(model).normalization(model))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (24, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = (torch.randint(0, classes, (24,), generator=generator) + shift) % classes
    images = from_tensors("noise", pixels, labels, scale)
    names = tuple("abcdefgh"[:classes])
    return Splits("noise", images, images.take(8), images.take(8), names, 3, 16, scale, Augmentation(0))


def disturbed(name: str) -> nn.Module:
    model = copy.deepcopy(adopted_once(name)[2])
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 0.05 * (-1) ** index)
    return model


@pytest.mark.parametrize("name", ["vit", "dinov2, registers", "hf vit"])
@pytest.mark.slow
def test_a_teacher_alone_needs_no_labels(name: str, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "teacher", adopted_once(name)[2]))
    losses = (Distillation(folder, weight=1.0), FeatureDistillation(folder))
    config = TrainingConfig(
        epochs=6, batch_size=8, learning_rate=1e-3, weight_decay=0.0, losses=losses, precision="fp32", warmup_epochs=0.0
    )
    first, second = disturbed(name), disturbed(name)
    with pytest.raises(InvalidInput, match=r"5 classes and noise has 3.*teacher only"):
        train(first, splits(first), replace(config, losses=(Task(), *losses)), tmp_path / "no")
    made = train(first, splits(first), config, tmp_path / "run")
    reported = [record["losses"]["distillation"] for record in made.history]
    assert reported[-1] < 0.7 * reported[0]
    saved = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in made.model.state_dict().items())
    other = train(second, splits(second, shift=1), config, tmp_path / "other labels")
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), other.model.parameters(), strict=True))
