"""Models of the user's with something odd about them: refused by an error, or used with the outputs that they have."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.support.errors import CheckpointError
from support.pretrained import SMALL, VIT, of_hf, of_timm, of_torchvision
from support.sweep.case import Case, finite
from support.sweep.draws import shuffled
from support.sweep.workshop import small_model

# How the original is made.
MAKERS: dict[str, Callable[[], Any]] = {
    "timm": lambda: of_timm(VIT).float(),
    "transformers": lambda: of_hf("ViTForImageClassification").float(),
    "torchvision": lambda: of_torchvision().float(),
    "own": small_model,
}


def _first(model: nn.Module, value: Any) -> nn.Module:
    weight = next(each for each in model.parameters() if each.ndim == 2)
    with torch.no_grad():
        weight.view(-1)[0] = value
    return model


def _last(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        list(model.parameters())[-1].fill_(value)
    return model


def _scaled(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(factor)
    return model


class Raising(nn.Module):
    """Raises in its forward."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def forward(self, *args: Any, **named: Any) -> Any:
        raise self.error


class Answering(nn.Module):
    """A model of the user's around another, which answers with what a function makes of its outputs."""

    def __init__(self, model: nn.Module, answer: Callable[[Tensor], Any]):
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, images: Tensor) -> Any:
        output = self.model(images)
        return self.answer(getattr(output, "logits", output))


class Modal(nn.Module):
    """Answers differently in training."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return None if self.training else self.model(images)


def _with_last(model: nn.Module, made: nn.Module) -> nn.Module:
    """Puts a module in the place of the last linear map."""
    name = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)][-1]
    above, _, own = name.rpartition(".")
    setattr(model.get_submodule(above), own, made)
    return model


def _with_norm(model: nn.Module, made: nn.Module) -> nn.Module:
    name = next(name for name, part in model.named_modules() if isinstance(part, nn.LayerNorm))
    above, _, own = name.rpartition(".")
    setattr(model.get_submodule(above), own, made)
    return model


def _shared(model: nn.Module) -> nn.Module:
    """Two linear maps of one shape share their weights."""
    maps = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for position, first in enumerate(maps):
        for second in maps[position + 1 :]:
            if first.weight.shape == second.weight.shape:
                second.weight = first.weight
                return model
    return model


def _deep_hooked(model: nn.Module) -> nn.Module:
    for part in model.modules():
        part.register_forward_hook(lambda module, args, output: None)
    return model


def _unpicklable(model: nn.Module) -> nn.Module:
    import threading

    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a NaN weight": lambda model: _first(model, float("nan")),
    "an infinite weight": lambda model: _first(model, float("inf")),
    "a huge weight": lambda model: _first(model, 1e38),
    "a NaN in the last bias": lambda model: _last(model, float("nan")),
    "all zero": lambda model: _scaled(model, 0.0),
    "all tiny": lambda model: _scaled(model, 1e-30),
    "all denormal": lambda model: _scaled(model, 1e-42),
    "all huge": lambda model: _scaled(model, 1e20),
    "float16": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.double(),
    "float8": lambda model: model.to(torch.float8_e4m3fn),
    "complex": lambda model: model.to(torch.complex64),
    "on meta": lambda model: model.to("meta"),
    "frozen": lambda model: model.requires_grad_(False),
    "training": lambda model: model.train(),
    "shared weights": _shared,
    "in shared memory": lambda model: model.share_memory(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "hooks everywhere": _deep_hooked,
    "a lock": _unpicklable,
    "no head": lambda model: _with_last(model, nn.Identity()),
    "a head of one": lambda model: _with_last(model, nn.Linear(_width(model), 1)),
    "a head of nothing": lambda model: _with_last(model, nn.Linear(_width(model), 0)),
    "a head that raises": lambda model: _with_last(model, Raising(KeyError("of the user"))),
    "a norm that raises": lambda model: _with_norm(model, Raising(ValueError("of the user"))),
    "a norm that exits": lambda model: _with_norm(model, Raising(SystemExit(3))),
    "a norm that stops": lambda model: _with_norm(model, Raising(StopIteration())),
    "a norm that asserts": lambda model: _with_norm(model, Raising(AssertionError())),
    "an error without a text": lambda model: _with_norm(model, Raising(RuntimeError())),
    "batch norm": lambda model: _with_norm(model, nn.BatchNorm1d(5)),
    "None for an output": lambda model: Answering(model, lambda logits: None),
    "a text for an output": lambda model: Answering(model, lambda logits: "a"),
    "a list of outputs": lambda model: Answering(model, lambda logits: [logits, logits]),
    "an empty output": lambda model: Answering(model, lambda logits: logits[:, :0]),
    "outputs of another batch": lambda model: Answering(model, lambda logits: logits.sum(0, keepdim=True)),
    "a number for an output": lambda model: Answering(model, lambda logits: logits.sum()),
    "outputs that differ": lambda model: Answering(model, lambda logits: logits + torch.randn_like(logits)),
    "outputs of NaN": lambda model: Answering(model, lambda logits: logits * float("nan")),
    "outputs of whole numbers": lambda model: Answering(model, lambda logits: logits.argmax(-1)),
    "outputs of booleans": lambda model: Answering(model, lambda logits: logits > 0),
    "outputs without gradients": lambda model: Answering(model, lambda logits: logits.detach()),
    "outputs of numpy": lambda model: Answering(model, lambda logits: logits.detach().numpy()),
    "other outputs in training": Modal,
    "in a sequence": lambda model: nn.Sequential(model),
    "in a list": lambda model: nn.ModuleList([model]),
    "in parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model),
    "traced": lambda model: torch.jit.trace(model, torch.zeros(2, 3, 16, 16), strict=False),
    "quantized": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
    "spectral norm": lambda model: nn.utils.parametrizations.spectral_norm(_linear(model)) and model,
    "a lazy map": lambda model: _with_last(model, nn.LazyLinear(3)),
    "only its class": type,
    "its weights alone": lambda model: model.state_dict(),
    "a copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "an identity": lambda model: nn.Identity(),
    "a convolution": lambda model: nn.Conv2d(3, 3, 3),
    "an empty module": lambda model: nn.Module(),
    "a perceptron": lambda model: nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, 3)),
    "a forward that exits": lambda model: nn.Sequential(model, Raising(SystemExit(3))),
    "an interrupting forward": lambda model: nn.Sequential(model, Raising(MemoryError())),
}


def _width(model: nn.Module) -> int:
    return [part for part in model.modules() if isinstance(part, nn.Linear)][-1].in_features


def _linear(model: nn.Module) -> nn.Module:
    return next(part for part in model.modules() if isinstance(part, nn.Linear))


# Odd shapes, of timm: models that are as they should be, and must work.
SHAPES: dict[str, dict[str, Any]] = {
    "one layer": {"depth": 1},
    "one head": {"num_heads": 1},
    "a head per channel": {"num_heads": 12},
    "one class": {"num_classes": 1},
    "two classes": {"num_classes": 2},
    "no classifier": {"num_classes": 0},
    "one patch": {"patch_size": 16},
    "many patches": {"patch_size": 2},
    "a wide image": {"img_size": (16, 32)},
    "one channel": {"in_chans": 1},
    "five channels": {"in_chans": 5},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3},
    "pooling by attention": {"global_pool": "map"},
    "norms of queries": {"qk_norm": True},
    "no bias": {"qkv_bias": False},
    "layer scale": {"init_values": 1e-5},
    "a narrow MLP": {"mlp_ratio": 0.1},
    "a wide MLP": {"mlp_ratio": 9.0},
    "dropout": {"drop_rate": 0.5, "attn_drop_rate": 0.5, "drop_path_rate": 0.5},
    "width of two": {"embed_dim": 2, "num_heads": 1},
    "a dynamic size": {"dynamic_img_size": True},
}


def _inputs(model: Any) -> Tensor:
    shape = (3, 16, 16)
    try:
        shape = rx.models.family_of(model).input_shape(model)
    except Exception:  # no family: the images of the makers
        pass
    weight = next((each for each in model.parameters() if each.is_floating_point()), torch.zeros(0))
    images = torch.randn(16, *shape, generator=torch.Generator().manual_seed(2))
    return images.to(weight.dtype) if weight.dtype in (torch.float64, torch.float16, torch.bfloat16) else images


def _loaded(model: Any) -> Any:
    """The outputs of a loaded model, and of the original."""
    loaded = rx.load(model)
    return loaded, model


def _alike(result: Any) -> str | None:
    """The law of `load`: the same outputs as the original, for other images."""
    loaded, model = result
    images = _inputs(loaded)[:2]
    with torch.no_grad():
        try:
            model.eval()(images)
        except Exception:  # a model of attnrx's own layers is not run by `load`
            return None
        if not isinstance(_tensor(model(images)), Tensor):
            return None
        wanted, found = (_tensor(each.eval()(images)) for each in (model, loaded))
    tolerance = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 0.1
    if not torch.allclose(wanted.double(), found.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
        return f"the loaded model differs by {(wanted.double() - found.double()).abs().max():.3g}"
    return None


def _tensor(output: Any) -> Tensor:
    return getattr(output, "logits", output)


def _saved(model: Any, folder: Path) -> Any:
    loaded = rx.load(model)
    rx.save(loaded, folder / "saved")
    try:
        return rx.load(folder / "saved"), loaded
    except CheckpointError as error:
        assert "factory" in str(error), error  # of a class of the user's
        return rx.load(folder / "saved", factory=lambda: copy.deepcopy(model)), loaded


def _smaller(model: Any) -> Any:
    loaded = rx.load(model)
    images = _inputs(loaded)
    diagnosis = rx.diagnose(loaded, images)
    slim = rx.realize(loaded, rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5"))
    return rx.verify(slim, loaded, images, "costs,fidelity")


def _costs(model: Any) -> Any:
    loaded = rx.load(model)
    return rx.models.family_of(loaded).costs(loaded)


USES: dict[str, tuple[Callable[[Any, Path], Any], Callable[[Any], str | None]]] = {
    "load": (lambda model, folder: _loaded(model), _alike),
    "save": (_saved, _alike),
    "costs": (lambda model, folder: _costs(model), finite),
    "diagnose, prescribe, realize, verify": (lambda model, folder: _smaller(model), finite),
    "merge tokens": (
        lambda model, folder: rx.realize(rx.load(model), rx.prescribe(rx.load(model), "tokens=tome:1@every")),
        lambda model: None,
    ),
    "shrink": (lambda model, folder: rx.shrink(model, _inputs(model), macs=0.7).evidence, finite),
}


@cache
def slots() -> tuple[tuple[str, str, str], ...]:
    changed = [(use, maker, change) for use in USES for maker in MAKERS for change in CHANGES]
    shaped = [(use, "shape", shape) for use in USES for shape in SHAPES]
    rare = [each for each in changed + shaped if each[0] == "shrink"]
    usual = [each for each in changed if each[0] != "shrink"]
    return tuple(
        shuffled(
            [
                *shuffled(usual, "models")[:150],
                *shuffled([each for each in shaped if each[0] != "shrink"], "shapes")[:40],
                *shuffled(rare, "shrink")[:20],
            ],
            "all models",
        )
    )


def draw(number: int, folder: Path) -> Case:
    use, maker, change = slots()[number]
    call, law = USES[use]
    if maker == "shape":
        model = timm.create_model(VIT, **{**SMALL, **SHAPES[change]}).eval()
        return Case(f"{use}: {change}", lambda: call(model, folder), law)
    original = MAKERS[maker]()
    try:
        model = CHANGES[change](original)
    except Exception:  # torch refuses the change itself
        model = original
    return Case(f"{use}: {maker} with {change}", lambda: call(model, folder), law)
