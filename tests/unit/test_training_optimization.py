"""The optimizer's groups, the learning rate, and the mean of the weights."""

import math
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx.training import TrainingConfig, train
from attnrx.training.checkpoints import load_optimizer_, optimizer_tensors
from attnrx.training.step import Schedule, WeightMean, build_optimizer
from support.cases import CONFIGS, images, model
from support.tiny_runs import config, splits
from support.tiny_runs import model as model_of_runs


def test_every_parameter_is_in_one_group_and_only_matrices_decay() -> None:
    vit = model(CONFIGS["svda"])
    config = TrainingConfig(weight_decay=0.3, strength_decay=0.2, strength_learning_rate=5.0)
    optimizer = build_optimizer(vit, config)
    members = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(members) == sorted(id(parameter) for parameter in vit.parameters())
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in vit.named_parameters():
        expected = 0.2 if name.endswith("strength") else 0.3 if parameter.ndim > 1 else 0.0
        assert decay[id(parameter)] == expected, name
    assert sorted(group["factor"] for group in optimizer.param_groups) == [1.0, 1.0, 5.0]


def test_strength_decay_shrinks_strengths_and_nothing_else() -> None:
    vit = model(CONFIGS["svda"])
    before = {name: parameter.detach().clone() for name, parameter in vit.named_parameters()}
    optimizer = build_optimizer(vit, TrainingConfig(weight_decay=0.0, strength_decay=0.5, learning_rate=0.1))
    for parameter in vit.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in vit.named_parameters():
        factor = 0.95 if name.endswith("strength") else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=1e-14, atol=0)


def test_the_state_of_the_optimizer_survives() -> None:
    config, inputs = TrainingConfig(learning_rate=0.01), images(CONFIGS["svda"])

    def step(vit, optimizer) -> None:
        vit(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    vit = model(CONFIGS["svda"])
    optimizer = build_optimizer(vit, config)
    step(vit, optimizer)
    twin = model(CONFIGS["svda"])
    twin.load_state_dict(vit.state_dict())
    again = build_optimizer(twin, config)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(vit, optimizer).items()}
    load_optimizer_(twin, again, saved)
    step(vit, optimizer)
    step(twin, again)
    assert all(torch.equal(a, b) for a, b in zip(vit.parameters(), twin.parameters(), strict=True))


def test_the_mean_of_the_weights_is_a_weighted_mean() -> None:
    vit = model(CONFIGS["svda-one-head"])
    name, parameter = next(iter(vit.named_parameters()))
    mean, expected = WeightMean(vit, decay=0.5), parameter.detach().clone()
    for step in range(1, 6):
        with torch.no_grad():
            parameter.add_(step)
        mean.update_(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * parameter.detach()
    torch.testing.assert_close(mean.tensors[name], expected, rtol=1e-12, atol=1e-12)
    live = parameter.detach().clone()
    with mean.in_place():
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(parameter, live)
    assert math.isfinite(float(expected.sum()))


def test_the_rate_begins_and_ends_where_it_is_told() -> None:
    config = TrainingConfig(
        epochs=10, batch_size=10, learning_rate=1.0, warmup_epochs=2.0, warmup_learning_rate=0.5, min_learning_rate=0.25
    )
    schedule = Schedule(config, 100 // config.batch_size)
    rates = [schedule.rate(step) for step in range(schedule.steps)]
    assert 0.5 < rates[0] < 0.53
    assert max(rates) == rates[20] == 1
    assert 0.25 < rates[-1] < 0.251
    assert rates[:21] == sorted(rates[:21])
    assert rates[20:] == sorted(rates[20:], reverse=True)


def test_parameters_without_gradient_stay_and_the_rest_moves(tmp_path: Path) -> None:
    vit = model_of_runs()
    for name, parameter in vit.named_parameters():
        parameter.requires_grad_(not name.startswith(("patches.", "layers.0.")))
    before = {name: parameter.detach().clone() for name, parameter in vit.named_parameters()}
    for name, parameter in train(vit, splits(), config(ema=None), tmp_path).model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    with pytest.raises(InvalidInput, match="requires a gradient"):
        train(vit.requires_grad_(False), splits(), config(), tmp_path / "none")
