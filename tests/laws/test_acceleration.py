"""An accelerated model computes what the model computes, is frozen, and becomes that model again."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.decide.planning.cost_table import exact_cost_table
from attnrx.decide.planning.measured_costs import PlanTimer
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.models import answer, family_of, working_copy
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.models.users.reader import ModuleFamily
from attnrx.vit.models.working.adopted import is_capturing
from support import pretrained
from support.pretrained import BLOCKS, CASES, OWN, VIT, of_hf, of_timm


def loaded(name: str) -> nn.Module:
    family, make = CASES[name]
    return rx.load(make(), reader=OWN) if isinstance(family, ModuleFamily) else rx.load(make())


def images(model: nn.Module, count: int = 5) -> torch.Tensor:
    return pretrained.inputs(working_copy(model), count)


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_it_computes_the_same_and_is_the_model_again(name: str) -> None:
    model = loaded(name)
    fast, pixels = rx.accelerate(model), images(model)
    expected = answer(model, pixels)
    assert isinstance(fast, type(model)) and type(fast).__name__ == type(model).__name__
    copies = [fast, copy.deepcopy(fast)]
    if not any(is_capturing(hook) for part in fast.modules() for hook in part._forward_hooks.values()):
        copies.append(pickle.loads(pickle.dumps(fast)))
    for each in copies:
        torch.testing.assert_close(answer(each, pixels), expected, rtol=1e-9, atol=1e-9)
    again = rx.plain(fast)
    assert type(again) is type(model) and record_of(again) is not None
    for each in (again, fast):
        assert list(each.state_dict()) == list(model.state_dict())
        assert all(torch.equal(each.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    torch.testing.assert_close(answer(again, pixels), expected, rtol=0, atol=0)
    assert [each.requires_grad for each in again.parameters()] == [each.requires_grad for each in model.parameters()]
    if "grouped" not in name:  # whose keys and values are stored once by the library, and for every head here
        assert family_of(fast).costs(fast) == family_of(model).costs(model)


def test_smaller_models_are_accelerated_too() -> None:
    model = rx.load(of_timm(VIT, depth=3, img_size=32))
    diagnosis = rx.diagnose(model, images(model, 12), moments=True)
    for rules in ("hidden=uniform_rank:0.5", "qk=uniform_rank:0.5 vo=uniform_rank:0.5", "tokens=ward:0.6@2,3"):
        small = rx.realize(model, rx.prescribe(diagnosis, rules))
        fast, pixels = rx.accelerate(small), images(model)
        torch.testing.assert_close(fast(pixels), small(pixels), rtol=1e-9, atol=1e-9)
        assert list(rx.plain(fast).state_dict()) == list(small.state_dict())
        evidence = rx.verify(fast, model, pixels, "fidelity,costs")  # verbs take it as any other
        assert evidence.about["candidate"] == rx.models.model_fingerprint(small)


def test_transformers_calls_it_as_before() -> None:
    model = rx.load(of_hf("ViTModel"))
    fast, pixels = rx.accelerate(model), images(model)
    for options in ({}, {"output_hidden_states": True}):
        found, expected = fast(pixel_values=pixels, **options), model(pixel_values=pixels, **options)
        assert type(found) is type(expected) and found.keys() == expected.keys()
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-9, atol=1e-9)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_hooks_and_settings_of_its_user_are_those_of_the_plain_one() -> None:
    original, calls = of_hf("ViTForImageClassification"), list[str]()
    removed = original.vit.layers[1].register_forward_hook(lambda *_: calls.append("removed"))
    fast: Any = rx.accelerate(rx.load(original))
    key = removed.id
    fast.register_forward_hook(lambda *_, **__: calls.append("model"), with_kwargs=True)
    fast.vit.layers[0].register_forward_pre_hook(lambda *_: calls.append("block"))
    del fast.vit.layers[1]._forward_hooks[key]
    fast.config.note, fast.vit.layers[0].flag = "changed", 3
    model: Any
    for model in (rx.plain(fast), rx.plain(copy.deepcopy(fast))):
        calls.clear()
        model(images(model))
        assert calls == ["block", "model"]
        assert model.config.note == "changed" and model.config is model.vit.config and model.vit.layers[0].flag == 3


def test_it_is_frozen_and_says_what_to_do() -> None:
    model = rx.load(of_timm(VIT))
    fast: Any = rx.accelerate(model)
    for change in (
        fast.train,
        fast.requires_grad_,
        lambda: fast.load_state_dict(model.state_dict()),
        lambda: setattr(fast, "head", nn.Linear(12, 3)),
    ):
        with pytest.raises(NotSupported, match=r"attnrx\.plain"):
            change()
    assert fast.eval() is fast and not any(each.requires_grad for each in fast.parameters())
    model.get_parameter("head.bias").data += 1  # a copy: the model may change
    assert not torch.allclose(fast(images(model)), model(images(model)))
    with pytest.raises(InvalidInput, match="accelerated already"):
        rx.accelerate(fast)
    with pytest.raises(InvalidInput, match="not accelerated"):
        rx.plain(model)
    with pytest.raises(InvalidInput, match=r"attnrx\.load"):
        rx.accelerate(of_timm(VIT))


@pytest.mark.usefixtures("single_precision")
@pytest.mark.slow
def test_shrink_accelerates_a_result_of_latency_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = PlanTimer.timings  # costs and speeds as on an idle machine
    monkeypatch.setattr(PlanTimer, "cost_table", lambda self: exact_cost_table(self.space, "macs"))
    monkeypatch.setattr(PlanTimer, "timings", lambda *given: [{**each, "faster": 1.12} for each in measured(*given)])
    model = of_timm(VIT, depth=4, img_size=64, patch_size=16, embed_dim=96).float()
    data = torch.randn(96, 3, 64, 64)
    assert type(rx.shrink(model, data, macs=0.7).model) is type(model)
    fast = rx.shrink(model, data, faster=1.1, threads=1).model
    assert type(fast) is not type(model) and isinstance(fast, type(model))
    assert type(rx.plain(fast)) is type(model)


def test_an_accelerated_model_is_saved_as_the_plain_one(tmp_path: Path) -> None:
    fast = rx.accelerate(rx.load(of_timm(VIT)))
    again = rx.load(rx.save(fast, tmp_path / "m"))
    pixels = torch.rand(2, *family_of(again).input_shape(again)).to(next(again.parameters()))
    torch.testing.assert_close(again(pixels), fast(pixels), rtol=1e-4, atol=1e-5)
