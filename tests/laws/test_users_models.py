"""Models as users have them: loaded with the axes that they have, realized, copied, saved, exported and shrunk."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import NotSupported
from attnrx.support.modules import tensors_of
from attnrx.vit.models import answer, family_of
from attnrx.vit.models.boundary.whole import needed_to_load
from attnrx.vit.models.working.adopted import remove_capturing_
from support.users_models import CASES, SIZE, made

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES = torch.randn(5, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TEXT = {"qk": "total_rank:0.5", "vo": "total_rank:0.5", "hidden": "total_rank:0.5", "tokens": "ward:0.75@2"}


def outputs(model: nn.Module, images: Tensor = IMAGES) -> dict[str, Tensor]:
    with torch.no_grad():
        found = answer(model, images) if isinstance(model, nn.Module) else model(images)
    return {"": found.logits} if hasattr(found, "logits") else tensors_of(found)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 0.0) -> None:
    pairs = zip(found.values(), expected.values(), strict=True)  # a model of transformers returns its logits alone
    for tensor, other in pairs:
        torch.testing.assert_close(tensor, other, rtol=0, atol=limit * max(1.0, float(other.abs().max())))


def axes(model: nn.Module) -> str:
    family = family_of(model)
    found = ["qk", "vo"] if any(layer.spec.heads for layer in family.attention(model)) else []
    found += ["hidden"] if family.has_plain_units(model) else []
    try:
        family.token_layout(model)
    except NotSupported:
        return " ".join(found)
    return " ".join([*found, "tokens"])


def smaller(model: nn.Module, by: str = "compress") -> nn.Module:
    text = " ".join(f"{axis}={TEXT[axis]}" for axis in axes(model).split())
    return rx.realize(model, rx.prescribe(rx.diagnose(model, IMAGES), text), by=by)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if case.is_slow else ()) for name, case in CASES.items()]
)
def test_it_has_its_axes_and_is_realized_copied_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, case = made(name), CASES[name]
    before = copy.deepcopy(model.state_dict())
    expected = outputs(case.of_images(model))
    loaded = rx.load(model)
    assert axes(loaded) == case.axes
    assert_equal(outputs(loaded), expected, 1e-10)
    slim = smaller(loaded)
    assert_equal(outputs(slim), outputs(smaller(loaded, "mask")), 1e-8)
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())
    assert_equal(outputs(case.of_images(model)), expected)
    family = family_of(slim)
    assert family.costs(slim).params == sum(parameter.numel() for parameter in slim.parameters())
    assert family.costs(slim).macs < family.costs(loaded).macs
    assert_equal(outputs(copy.deepcopy(slim)), outputs(slim))
    remove_capturing_(slim)  # what transformers puts on a backbone when it is called, which cannot be pickled
    assert_equal(outputs(pickle.loads(pickle.dumps(slim))), outputs(slim))
    assert needed_to_load(slim).startswith("attnrx.load") == case.needs_factory
    rx.save(slim, tmp_path / "slim")
    again = rx.load(tmp_path / "slim", factory=(lambda: made(name)) if case.needs_factory else None)
    assert_equal(outputs(again), outputs(slim))
    assert family.costs(again) == family.costs(slim)
    if case.call is not None:
        with torch.no_grad():
            found, expected = case.call(loaded, IMAGES), case.call(model, IMAGES)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
            torch.testing.assert_close(case.call(again, IMAGES), case.call(slim, IMAGES))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES][::2])
def test_its_file_computes_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    slim = smaller(rx.load(made(name).float()))
    file = rx.export(slim, tmp_path / "model.onnx")
    assert_equal(outputs(file, IMAGES.float()), outputs(slim, IMAGES.float()), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES][1::2])
def test_it_is_shrunk(name: str, single_precision: None) -> None:
    model = made(name).float()
    images = torch.randn(96, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    shrunk = rx.shrink(model, images, macs=0.85, batch=16)
    found, expected = outputs(shrunk.model, images[:8]), outputs(CASES[name].of_images(model), images[:8])
    for tensor, other in zip(found.values(), expected.values(), strict=True):
        assert tensor.shape == other.shape and tensor.isfinite().all()
    original = rx.load(model)
    assert family_of(shrunk.model).costs(shrunk.model).macs <= 0.86 * family_of(original).costs(original).macs
