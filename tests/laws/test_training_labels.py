"""Labels are read by the losses that need them and by nothing else: training without labels, and with wrong ones."""

from pathlib import Path

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import DataError, InvalidInput
from attnrx.training import TrainingConfig
from attnrx.training.losses import Distillation, FeatureDistillation, Task
from attnrx.vit.models import family_of
from attnrx.vit.models.boundary.adoption import adopt
from support import cases
from support.pretrained import TIMM, VIT, adopted_once, of_timm

COUNT = 16


def images(model: nn.Module, count: int = COUNT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator)


def settings(*losses: rx.losses.Loss) -> TrainingConfig:
    return TrainingConfig(epochs=1, batch_size=8, precision="fp32", losses=losses)


@pytest.fixture
def own() -> nn.Module:
    return cases.model(cases.CONFIGS["dense"])


def test_a_model_is_trained_without_any_label(own: nn.Module, tmp_path: Path) -> None:
    lines: list[str] = []
    teacher = Distillation(str(rx.save(cases.model(cases.CONFIGS["svda"]), tmp_path / "teacher")))
    data = images(own)
    made = rx.train(own, {"train": data, "validation": data}, settings(teacher), tmp_path / "run", log=lines.append)
    unmeasured = {"test": None, "validation": None, "best_validation": None, "best_epoch": None}
    assert made.record["accuracy"] == unmeasured
    assert all(made.history[0][name] is None for name in ("accuracy", "validation_accuracy", "validation_loss"))
    assert not any("validation" in line for line in lines)
    again = rx.train(own, {"train": data, "validation": data}, settings(teacher), tmp_path / "run")
    assert again.record["accuracy"] == unmeasured


def test_labels_of_the_validation_images_are_enough_for_its_accuracy(own: nn.Module, tmp_path: Path) -> None:
    teacher = Distillation(str(rx.save(cases.model(cases.CONFIGS["svda"]), tmp_path / "teacher")))
    data, labels = images(own), torch.arange(COUNT) % 3
    made = rx.train(own, {"train": data, "validation": (data, labels)}, settings(teacher), tmp_path / "run")
    assert made.history[0]["accuracy"] is None
    assert 0 <= made.record["accuracy"]["validation"] <= 1


def test_labels_that_no_loss_reads_may_be_any(own: nn.Module, tmp_path: Path) -> None:
    teacher = Distillation(str(rx.save(cases.model(cases.CONFIGS["svda"]), tmp_path / "teacher")))
    data = images(own)
    splits = {"train": (data, torch.arange(COUNT)), "validation": data}
    assert rx.train(own, splits, settings(teacher), tmp_path / "run").record["steps"] == 2


def test_a_loss_that_reads_labels_requires_them(own: nn.Module, tmp_path: Path) -> None:
    data = images(own)
    with pytest.raises(DataError, match="label"):
        rx.train(own, {"train": data, "validation": data}, settings(Task()), tmp_path / "run")


@pytest.mark.parametrize("bad", [-1, -7, 3])
@pytest.mark.parametrize("form", ["tensors", "dataset", "validation"])
def test_labels_are_classes_of_the_model(own: nn.Module, form: str, bad: int, tmp_path: Path) -> None:
    data, labels = images(own), torch.arange(COUNT) % 3
    wrong = labels.clone()
    wrong[5] = bad
    pairs = [(data[row], int(wrong[row])) for row in range(COUNT)]
    train = {"tensors": (data, wrong), "dataset": Pairs(pairs), "validation": (data, labels)}[form]
    validation = (data, wrong if form == "validation" else labels)
    found = "without a label" if bad == -1 else f"the label {bad}"
    with pytest.raises(DataError, match=rf"{found}, and the model has the classes 0 to 2"):
        rx.train(own, {"train": train, "validation": validation}, settings(Task()), tmp_path / "run")


class Pairs(torch.utils.data.Dataset):
    """A dataset that does not list its labels."""

    def __init__(self, pairs: list[tuple[torch.Tensor, int]]):
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.pairs[row]


def test_a_model_without_a_classifier_learns_the_features_of_its_teacher(tmp_path: Path) -> None:
    model = adopted_once("vit, no classifier")[2]
    folder = str(rx.save(model, tmp_path / "teacher"))
    student = adopt(TIMM, of_timm(VIT, num_classes=0))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(1.1)
    data, labels = images(model), torch.arange(COUNT) % 3
    learning = settings(FeatureDistillation(folder))
    made = rx.train(student, {"train": data, "validation": (data, labels)}, learning, tmp_path / "run")
    assert made.record["accuracy"]["validation"] is None
    with pytest.raises(InvalidInput, match="the losses task read labels, and the model has no classifier"):
        rx.train(student, {"train": (data, labels), "validation": data}, settings(Task()), tmp_path / "other")


def test_a_model_of_one_logit_is_distilled_without_an_accuracy(tmp_path: Path) -> None:
    model = adopt(TIMM, of_timm(VIT, num_classes=1))
    teacher = Distillation(str(rx.save(model, tmp_path / "teacher")))
    data, labels = images(model), torch.arange(COUNT) % 2
    made = rx.train(model, {"train": data, "validation": (data, labels)}, settings(teacher), tmp_path / "run")
    assert made.record["accuracy"]["validation"] is None
    with pytest.raises(InvalidInput, match="1 classes and data has 2"):
        rx.train(model, {"train": (data, labels), "validation": data}, settings(Task()), tmp_path / "other")


def test_a_model_of_wide_images_is_trained(tmp_path: Path) -> None:
    model = adopt(TIMM, of_timm(VIT, img_size=(16, 24)))
    data, labels = images(model), torch.arange(COUNT) % 5
    made = rx.train(model, {"train": (data, labels), "validation": (data, labels)}, settings(Task()), tmp_path / "run")
    assert made.record["steps"] == 2
    with pytest.raises(InvalidInput, match=r"\(3, 16, 24\) \(channels, height, width\) and data has \(3, 24, 16\)"):
        rx.train(model, {"train": (data.mT, labels), "validation": data}, settings(Task()), tmp_path / "other")
