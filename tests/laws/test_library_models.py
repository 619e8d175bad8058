"""What `load` and `realize` return is the library's own model: its class, keys, signature, hooks, modes, gradients.

A part is replaced only where a prescription changed it.
"""

import copy
import inspect
import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.errors import InvalidRule, NotSupported
from attnrx.support.modules import rows_of
from attnrx.vit.models import family_of
from attnrx.vit.models.boundary.working_copy import library_form, working_copy
from attnrx.vit.models.parts.module_inputs import called
from attnrx.vit.models.users.reader import ModuleFamily
from attnrx.vit.models.working.adopted import is_capturing
from support import pretrained
from support.pretrained import CASES, OWN


@cache
def case(name: str) -> tuple[nn.Module, nn.Module]:
    """A model with a hook, frozen weights and a part in training, and what `load` returns for it."""
    family, make = CASES[name]
    model = make()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 0)
    model.register_forward_hook(_hook)
    loaded = rx.load(model, reader=OWN) if isinstance(family, ModuleFamily) else rx.load(model)
    return model, loaded


def _hook(model: nn.Module, args: object, output: object) -> None:
    """Does nothing."""


def answers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model returns for random images, called as its library calls it."""
    working = working_copy(model)
    images = pretrained.inputs(working)
    with torch.no_grad():
        inputs: Any = family_of(model).inputs(model)
        if inputs is None:
            output = called(model, images)
        else:
            positional, named = inputs.arguments(images)
            output = model(*positional, **named)
    found = dict(output.items()) if isinstance(output, Mapping) else {"": output}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def require_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], limit: float = 1e-10) -> None:
    assert first.keys() == second.keys() and first
    for key, tensor in first.items():
        assert tensor.shape == second[key].shape
        assert float((tensor - second[key]).abs().max()) <= limit * (1 + float(tensor.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_model_is_the_librarys_own(name: str) -> None:
    model, loaded = case(name)
    assert type(loaded) is type(model)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in model.state_dict().items())
    assert inspect.signature(loaded.forward) == inspect.signature(model.forward)
    assert [type(part) for part in loaded.modules()] == [type(part) for part in model.modules()]
    assert [part.training for part in loaded.modules()] == [part.training for part in model.modules()]
    own, other = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert {key: each.requires_grad for key, each in own.items()} == {key: w.requires_grad for key, w in other.items()}
    for part, like in zip(loaded.modules(), model.modules(), strict=True):
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            assert list(getattr(part, hooks).values()) == list(getattr(like, hooks).values())
    require_equal(answers(model_of(loaded)), answers(loaded), 0.0)
    assert not any(each is loaded for each in model.modules())


def model_of(loaded: nn.Module) -> nn.Module:
    return copy.deepcopy(loaded)


def realized(name: str, text: str) -> nn.Module:
    _, loaded = case(name)
    images = pretrained.inputs(working_copy(loaded), 12)
    diagnosis = rx.diagnose(loaded, images, moments=True)
    return rx.realize(loaded, rx.prescribe(diagnosis, text))


@pytest.mark.parametrize("name", CASES)
def test_fewer_hidden_units_change_shapes_alone(name: str) -> None:
    _, loaded = case(name)
    try:
        small = realized(name, "hidden=uniform_rank:0.5")
    except (NotSupported, InvalidRule):
        pytest.skip("the model has no hidden units that can be removed")
    assert type(small) is type(loaded)
    # The map after the units has a bias in any case: the mean of what they gave.
    added = {key for key in small.state_dict() if key not in loaded.state_dict()}
    assert set(loaded.state_dict()) <= set(small.state_dict()) and all(key.endswith("bias") for key in added)
    assert [type(part) for part in small.modules()] == [type(part) for part in loaded.modules()]
    assert sum(each.numel() for each in small.parameters()) < sum(each.numel() for each in loaded.parameters())
    before, after = dict(loaded.named_parameters()), dict(small.named_parameters())
    assert all(after[key].requires_grad == each.requires_grad for key, each in before.items())
    _require_same(small)


@pytest.mark.parametrize("name", CASES)
def test_ranks_change_the_keys_of_attention_alone(name: str) -> None:
    _, loaded = case(name)
    try:
        small = realized(name, "qk=uniform_rank:0.5 vo=uniform_rank:0.5")
    except NotSupported:
        try:
            small = realized(name, "vo=uniform_rank:0.5")
        except NotSupported:
            pytest.skip("norms inside attention need all directions")
    assert type(small) is type(loaded)
    attention = [path for path, part in small.named_modules() if hasattr(part, "attention") and hasattr(part, "prefix")]
    changed = set(small.state_dict()) ^ set(loaded.state_dict())
    assert changed and all(any(key.startswith(f"{path}.") for path in attention) for key in changed)
    _require_same(small)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_pruned_in_the_librarys_own_model(name: str) -> None:
    _, loaded = case(name)
    try:
        small = realized(name, "tokens=tome:0.6@2")
    except NotSupported:
        pytest.skip("tokens of this model cannot be pruned")
    assert type(small) is type(loaded)
    _require_same(small)


def _require_same(small: nn.Module) -> None:
    """The model, its working copy, a copy, a pickle and the way back return the same."""
    expected = answers(small)
    working = working_copy(small)
    images = pretrained.inputs(working)
    with torch.no_grad():
        rows = rows_of(working(images))
        copies = [copy.deepcopy(small), library_form(working)]
        # transformers installs hooks in a call that cannot be pickled.
        if not any(is_capturing(hook) for part in small.modules() for hook in part._forward_hooks.values()):
            copies.append(pickle.loads(pickle.dumps(copy.deepcopy(small))))
    for each in copies:
        require_equal(expected, answers(each), 1e-9)
        assert list(each.state_dict()) == list(small.state_dict())
        assert torch.allclose(rows_of(working_copy(each)(images)), rows, rtol=1e-9, atol=1e-9)


class Encoder(nn.Module):
    """A user's own: the encoder of PyTorch, whose layers take batches or tokens first."""

    def __init__(self, batch_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 3, 24, 0.0, "gelu", batch_first=batch_first, norm_first=True)
        self.patch, self.head, self.batch_first = nn.Conv2d(3, 12, 8, 8), nn.Linear(12, 5), batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=False)
        self.token = nn.Parameter(torch.zeros(1, 1, 12))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        tokens = self.patch(pixels).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0] if self.batch_first else self.encoder(tokens.transpose(0, 1))[0])


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("rules", ["hidden=uniform_rank:0.5", "qk=uniform_rank:0.5", "tokens=tome:0.6@2"])
def test_structures_that_are_found_stay_the_users(rules: str, batch_first: bool) -> None:
    model = pretrained.shaken(Encoder(batch_first))
    loaded = rx.load(model)
    images = pretrained.inputs(working_copy(loaded), 12)
    small = rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images, moments=True), rules))
    assert type(small) is Encoder
    if rules.startswith("hidden"):
        assert list(small.state_dict()) == list(model.state_dict())
        assert [type(part) for part in small.modules()] == [type(part) for part in model.modules()]
    _require_same(small)


def test_the_result_of_a_verb_has_memory_of_its_own() -> None:
    _, loaded = case("vit")
    addresses = {weight.data_ptr() for weight in loaded.parameters()}
    for other in (rx.load(loaded), realized("vit", "hidden=uniform_rank:0.5"), rx.plain(rx.accelerate(loaded))):
        assert not addresses & {weight.data_ptr() for weight in other.parameters()}


def test_saved_models_load(tmp_path: Any) -> None:
    small = realized("vit", "qk=uniform_rank:0.5 hidden=uniform_rank:0.5 tokens=tome:0.6@2")
    rx.save(small, tmp_path / "small")
    loaded = rx.load(tmp_path / "small")
    assert type(loaded) is type(small) and list(loaded.state_dict()) == list(small.state_dict())
    require_equal(answers(small), answers(loaded), 0.0)
