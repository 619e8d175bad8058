"""Verbs leave models, gradients, hooks and the global random states as they were, whatever the caller's modes are."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnrx
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.repair import Repair
from attnrx.data import Normalization, from_tensors
from attnrx.show.checks import Fidelity
from attnrx.vit.models import model_fingerprint
from attnrx_lab.rules import measure_divergence
from attnrx_lab.vision_transformer import VisionTransformer
from support.cases import CONFIGS, pixels
from support.cases import model as model_of
from support.pretrained import VIT, of_timm

pytestmark = pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning")


def images(model: nn.Module) -> Any:
    """Images with labels."""
    if isinstance(model, VisionTransformer):
        return pixels(model.config, 24)
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(256, (24, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return from_tensors("random", raw, torch.arange(24) % 5, Normalization((0.5,) * 3, (0.5,) * 3))


@cache
def original() -> nn.Module:
    return of_timm(VIT).float()


@cache
def made(kind: str) -> tuple[nn.Module, Any, Any, Any]:
    """A model, its diagnosis, a prescription and the realized model."""
    model = attnrx.load(original()) if kind == "timm" else model_of(CONFIGS["svda"]).float()
    data = images(model)
    diagnosis = attnrx.diagnose(model, data, moments=True)
    prescription = attnrx.prescribe(diagnosis, "qk=total_rank:0.7 fc1=uniform_rank:0.7")
    return model, diagnosis, prescription, attnrx.realize(model, prescription)


Call = Callable[[str, Path], Any]


def of(function: Callable[..., Any]) -> Call:
    def call(kind: str, folder: Path) -> Any:
        model, diagnosis, prescription, small = made(kind)
        return function(model, images(model), diagnosis, prescription, small, folder)

    return call


VERBS: dict[str, Call] = {
    "load": of(lambda model, data, diagnosis, given, small, folder: attnrx.load(original())),
    "diagnose": of(lambda model, data, *_: attnrx.diagnose(model, data, moments=True)),
    "measure_divergence": of(lambda model, data, diagnosis, *_: measure_divergence(model, diagnosis, data)),
    "realize": of(lambda model, data, diagnosis, given, *_: attnrx.realize(model, given)),
    "repair": of(
        lambda model, data, diagnosis, given, small, _: attnrx.repair(small, model, data, Repair(steps=2)).model
    ),
    "distill": of(
        lambda model, data, diagnosis, given, small, _: attnrx.distill(small, model, data, Distill(epochs=1)).model
    ),
    "verify": of(lambda model, data, diagnosis, given, small, _: attnrx.verify(small, model, data, [Fidelity()])),
    "save": of(lambda model, data, diagnosis, given, small, folder: attnrx.save(small, folder / "saved")),
    "export": of(
        lambda model, data, diagnosis, given, small, folder: attnrx.export(small, folder / "m.pt2", to="program")
    ),
    "shrink": of(lambda model, data, *_: attnrx.shrink(model, data, macs=0.9)),
}
SLOW = {"shrink", "export"}
CASES = [
    pytest.param(kind, name, id=f"{name}-{kind}", marks=[pytest.mark.slow] if name in SLOW else [])
    for name in VERBS
    for kind in ("timm", "own")
    if (kind, name) not in {("own", "load"), ("own", "measure_divergence")}
]


def states(model: nn.Module) -> Iterator[Any]:
    yield np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    yield torch.get_rng_state().tolist()
    yield torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    for name, part in model.named_modules():
        hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks
        yield name, part.training, [list(each.items()) for each in hooks]
    for name, weight in model.named_parameters():
        gradient = None if weight.grad is None else weight.grad.tolist()
        yield name, weight.requires_grad, gradient, id(weight)
    yield model_fingerprint(model)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_verbs_leave_everything_as_it_was(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _, small = made(kind)
    shapes: list[torch.Size] = []
    for each in (model, small):
        # Of mixed modes, partly frozen, with gradients and an observing hook.
        parts, weights = list(each.modules()), list(each.parameters())
        for index, part in enumerate(parts):
            part.training = index % 3 == 0
        for index, weight in enumerate(weights):
            weight.requires_grad_(index % 2 == 0)
            weight.grad = torch.full_like(weight, 0.5) if index % 4 == 0 else None
    handle = parts[-1].register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    # Replaced, because the type checks of the tests draw numbers from the real one.
    restored: list[Any] = []
    monkeypatch.setattr(random, "getstate", lambda: "the state before")
    monkeypatch.setattr(random, "setstate", restored.append)
    np.random.seed(2)
    torch.manual_seed(3)
    before = [list(states(each)) for each in (model, small)]
    try:
        VERBS[name](kind, tmp_path)
        assert [list(states(each)) for each in (model, small)] == before
        assert restored[-1] == "the state before"
    finally:
        handle.remove()
        for each in (model, small):
            each.eval().requires_grad_(True)
            for weight in each.parameters():
                weight.grad = None


def result_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return model_fingerprint(value)
    return value.fingerprint if hasattr(value, "fingerprint") else None


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_modes_of_the_caller_change_no_result(kind: str, name: str, mode: str, tmp_path: Path) -> None:
    results = []
    for number, context in enumerate((nullcontext, MODES[mode])):
        folder = tmp_path / str(number)
        folder.mkdir()
        with context():
            result = VERBS[name](kind, folder)
        results.append(result_of(result))
        if isinstance(result, nn.Module):
            assert not any(weight.is_inference() for weight in result.parameters())
    assert results[0] == results[1]
