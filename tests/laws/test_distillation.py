"""Laws of distillation: outputs come nearer to the original's, also with merged tokens, and nothing else changes."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.realization.distillation import HELD_OUT, Distill, distill
from attnrx.support.errors import InvalidInput
from attnrx.vit.models import family_of
from attnrx.vit.outputs import output_kind_of
from support import cases
from support.pretrained import BLOCKS, adopted_once

FEW = Distill(epochs=8, learning_rates=(3e-3,), batch=16)


def images_of(model: nn.Module, count: int = 32) -> Tensor:
    generator, dtype = torch.Generator().manual_seed(0), next(model.parameters()).dtype
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator).to(dtype)


@pytest.fixture(scope="module")
def own() -> tuple[nn.Module, nn.Module, Tensor]:
    """A model, one with half of its hidden units and merged tokens, and images."""
    model = cases.model(cases.CONFIGS["dense"])
    images = images_of(model, 96)
    rules = "hidden=uniform_rank:0.5,metric=weights tokens=tome:0.5@2"
    return model, rx.realize(model, rx.prescribe(rx.diagnose(model, images, moments=True), rules)), images


def softened(model: nn.Module, other: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return float(output_kind_of(model).softened(model(images), other(images)).mean())


@pytest.mark.parametrize("name", BLOCKS[::4])
def test_every_architecture_is_distilled(name: str, tmp_path: Any) -> None:
    _, _, model = adopted_once(name)
    images, changed = images_of(model), copy.deepcopy(model)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in changed.parameters():
            size = parameter.square().mean().sqrt()
            parameter.add_(0.05 * size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    result = distill(changed, model, images, FEW)
    assert 0 < result.after[0] < result.before[0]
    loaded = rx.load(rx.save(result.model, tmp_path / "model"))
    torch.testing.assert_close(loaded(images[:3]), result.model(images[:3]), rtol=1e-9, atol=1e-9)


def test_units_and_merged_tokens_come_nearer_on_held_out_images(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    result = distill(small, model, images, FEW)
    positions = torch.arange(len(images)) % FEW.batch % HELD_OUT == HELD_OUT - 1
    assert result.after[0] < 0.9 * result.before[0]
    assert result.before[0] == pytest.approx(softened(model, small, images[positions]), rel=1e-4)
    assert result.after[0] == pytest.approx(softened(model, result.model, images[positions]), rel=1e-4)


def test_held_out_images_are_not_fitted_to(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    others = images.clone()
    held_out = torch.arange(len(images)) % FEW.batch % HELD_OUT == HELD_OUT - 1
    others[held_out] = images[held_out].flip(-1)
    first, second = (distill(small, model, given, FEW) for given in (images, others))
    assert first.before != second.before
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_models_stay_as_they_were_and_the_result_repeats(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    small = copy.deepcopy(small).train()
    small.get_parameter(next(name for name, _ in small.named_parameters())).requires_grad_(False)
    before = [copy.deepcopy(each.state_dict()) for each in (model, small)]
    first, again = (distill(small, model, images, FEW).model for _ in range(2))
    for each, state in zip((model, small), before, strict=True):
        assert all(torch.equal(each.state_dict()[name], value) for name, value in state.items())
    assert all(torch.equal(first.state_dict()[name], value) for name, value in again.state_dict().items())
    assert first.training and not any(parameter.grad is not None for parameter in first.parameters())
    assert [each.requires_grad for each in first.parameters()] == [each.requires_grad for each in small.parameters()]


def test_half_precision_is_fitted_in_single_precision(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    half = copy.deepcopy(small).to(torch.bfloat16)
    result = distill(half, model, images, FEW)
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}
    assert result.after[0] < 0.9 * result.before[0]


def test_a_fit_that_does_not_help_is_not_kept(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    result = distill(small, model, images, Distill(epochs=1, learning_rates=(0.9,), batch=16))
    assert result.after == result.before
    assert all(torch.equal(small.state_dict()[name], value) for name, value in result.model.state_dict().items())
    equal = distill(model, model, images, FEW)
    assert equal.before == equal.after and equal.before[0] < 1e-28 and equal.learning_rate is None


@pytest.mark.slow
def test_the_best_of_several_learning_rates_is_kept(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    alone = {rate: distill(small, model, images, replace(FEW, learning_rates=(rate,))) for rate in (1e-5, 3e-3, 0.9)}
    best = distill(small, model, images, replace(FEW, learning_rates=(1e-5, 3e-3, 0.9)))
    assert best.learning_rate == 3e-3 and alone[1e-5].after > best.after and alone[0.9].learning_rate is None
    # From the same start and on the same images as alone.
    for one, other in zip(best.model.parameters(), alone[3e-3].model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_distilled_is_refused(own: tuple[nn.Module, nn.Module, Tensor]) -> None:
    model, small, images = own
    with pytest.raises(InvalidInput, match="at least 16"):
        distill(small, model, images[:15])
    with pytest.raises(InvalidInput, match="epochs=0"):
        Distill(epochs=0)
    other = cases.model(replace(cases.CONFIGS["dense"], classes=7))
    with pytest.raises(InvalidInput, match="made from the reference"):
        distill(other, model, images)
