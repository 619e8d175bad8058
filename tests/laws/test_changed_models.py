"""A model that was written to after it was loaded is what is saved and what verbs compute with, or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.vit.models import answer
from support.users_models import CLASSES, SIZE, WIDTH, of_timm, of_torchvision, of_transformers

MODELS: dict[str, Callable[[], Any]] = {
    "timm": of_timm,
    "torchvision": of_torchvision,
    "transformers": lambda: of_transformers(hidden_act="relu"),
}


def loaded(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))  # heads start at zero
    return rx.load(model)


def another_activation(model: nn.Module) -> None:
    for path, part in list(model.named_modules()):
        if isinstance(part, nn.GELU | nn.ReLU) or "Activation" in type(part).__name__:
            model.set_submodule(path, nn.SiLU())


def another_epsilon(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 0.5


def dropout(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.25


def no_bias(model: nn.Module) -> None:
    part: Any = next(part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features > WIDTH)
    part.bias = None


def hook(model: nn.Module) -> None:
    def doubled(module: nn.Module, inputs: Any, output: Any) -> Any:
        return 2 * output

    next(part for part in model.modules() if isinstance(part, nn.LayerNorm)).register_forward_hook(doubled)


CHANGES = [another_activation, another_epsilon, dropout, no_bias, hook]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_folder_cannot_hold_is_not_saved(tmp_path: Path, name: str, change: Callable[[nn.Module], None]) -> None:
    model = loaded(name)
    change(model)
    images = torch.rand(2, 3, SIZE, SIZE)
    expected = answer(model, images)
    try:
        rx.save(model, tmp_path / "m")
    except NotSupported:
        assert list(tmp_path.iterdir()) == []
        return
    again = rx.load(tmp_path / "m")
    assert float((answer(again, images) - expected).abs().max()) < 1e-4
    own, other = (sorted(part.p for part in each.modules() if isinstance(part, nn.Dropout)) for each in (model, again))
    assert own == other


@pytest.mark.parametrize("name", MODELS)
def test_a_new_head_of_zeros_hides_no_change(tmp_path: Path, name: str) -> None:
    model = loaded(name)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.out_features == CLASSES:
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)
    another_activation(model)
    with pytest.raises(NotSupported, match="was not saved"):
        rx.save(model, tmp_path / "m")


def test_an_attribute_that_the_model_reads_otherwise_is_refused() -> None:
    model = loaded("timm")
    for block in model.blocks:
        block.attn.scale *= 3  # which attention of PyTorch does not read
    with pytest.raises(NotSupported, match=r"was changed after attnrx\.load"):
        rx.diagnose(model, torch.rand(8, 3, SIZE, SIZE))


def test_what_a_folder_can_hold_is_saved(tmp_path: Path) -> None:
    model = loaded("timm")
    model.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 7))
    images = torch.rand(2, 3, SIZE, SIZE)
    assert torch.equal(rx.load(rx.save(model, tmp_path / "m"))(images), model(images))
