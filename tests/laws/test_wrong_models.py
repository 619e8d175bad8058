"""Models that were changed in every part: each gives a copy with the same outputs, or an error that names the part.

A case is a library and a kind of change, which is made to every eighth part of a small model: other parts in the other
libraries, whose models have the same parts, and for the next kind.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import attnrx as rx
from attnrx.support.errors import AttnrxError
from attnrx.support.modules import rows_of, tensors_of
from support.pretrained import OWN, VIT, OwnViT, of_hf, of_timm, of_torchvision, shaken
from support.time_limits import time_limit

pytestmark = pytest.mark.filterwarnings("ignore")
SECONDS, STEP = 120, 8
LIBRARIES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "timm": (lambda: of_timm(VIT), {}),
    "transformers": (lambda: of_hf("ViTForImageClassification"), {}),
    "torchvision": (of_torchvision, {}),
    "own": (lambda: shaken(OwnViT()), {"reader": OWN}),
}
IMAGES = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def as_for_a_user() -> Iterator[None]:
    """No type checks of arguments, which users do not have either, and an end to every hang."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with time_limit(SECONDS):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


def is_inner(path: str) -> bool:
    """Whether a part is of the second block or of a later one, whose parts are like those of the first."""
    return re.search(r"\.(encoder_layer_)?[1-9]\d*(\.|$)", path) is not None and "layers.0" not in path


def parameters(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """The path, the owner, the name there, and the parameter; of the blocks those of the first one."""
    return [
        (f"{path}.{name}".lstrip("."), owner, name, parameter)
        for path, owner in model.named_modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if not is_inner(f"{path}.")
    ]


def parts(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Module]]:
    """The path, the parent, the name there, and the part."""
    found = []
    for path, part in model.named_modules():
        if path and not is_inner(f"{path}."):
            above, _, name = path.rpartition(".")
            found.append((path, model.get_submodule(above), name, part))
    return found


def twin(model: nn.Module, path: str) -> str:
    """The path of the same part of the second block."""
    return re.sub(r"(?<=[._])0(?=\.|$)", "1", path, count=1)


# Changes of one parameter: each returns what takes its place.

Of = Callable[[Tensor], Any]


def element(value: float) -> Of:
    def changed(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return changed


TENSORS: dict[str, Of] = {
    "nan": element(float("nan")),
    "huge": lambda tensor: tensor * 1e200,
    "zeros": torch.zeros_like,
    "meta": lambda tensor: tensor.to("meta"),
    "complex": lambda tensor: tensor.to(torch.complex128),
    "integers": lambda tensor: tensor.to(torch.int8),
    "sparse": lambda tensor: tensor.to_sparse(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "half": lambda tensor: tensor.half(),
    "single": lambda tensor: tensor.float(),
    "shorter": lambda tensor: tensor[:-1].clone() if len(tensor) > 1 else tensor.repeat(2, *[1] * (tensor.ndim - 1)),
    "transposed": lambda tensor: tensor.mT.contiguous() if tensor.ndim > 1 else tensor[:, None].clone(),
    "empty": lambda tensor: tensor[:0].clone(),
    "a number": lambda tensor: tensor.flatten()[0].clone(),
    "expanded": lambda tensor: tensor.flatten()[0].expand(tensor.shape),
    "not contiguous": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0],
}
PLACES: dict[str, Callable[[nn.Module, nn.Module, str, nn.Parameter, str], object]] = {
    "none": lambda model, owner, name, parameter, path: setattr(owner, name, None),
    "deleted": lambda model, owner, name, parameter, path: delattr(owner, name),
    "a buffer": lambda model, owner, name, parameter, path: (
        delattr(owner, name),
        owner.register_buffer(name, parameter.detach().clone()),
    )[-1],
    "an attribute": lambda model, owner, name, parameter, path: (
        delattr(owner, name),
        setattr(owner, name, parameter.detach() * 1.0),
    )[-1],
    "computed": lambda model, owner, name, parameter, path: (
        delattr(owner, name),
        setattr(owner, name, parameter * 1.0),
    )[-1],
    "a subclass": lambda model, owner, name, parameter, path: setattr(owner, name, OfUser(parameter.detach().clone())),
    "frozen": lambda model, owner, name, parameter, path: parameter.requires_grad_(False) and None,
    "with a gradient": lambda model, owner, name, parameter, path: setattr(
        parameter, "grad", torch.ones_like(parameter)
    ),
    "tied to the next block": lambda model, owner, name, parameter, path: tie(model, path, parameter),
    "under a hook": lambda model, owner, name, parameter, path: (
        parameter.register_hook(lambda slope: 2 * slope) and None
    ),
}


class OfUser(nn.Parameter):
    """A parameter of a class of the user's."""


def tie(model: nn.Module, path: str, parameter: nn.Parameter) -> None:
    above, _, name = twin(model, path).rpartition(".")
    setattr(model.get_submodule(above), name, parameter)


# Changes of one part: each returns what takes its place.


class Followed(nn.Module):
    """A part, and a function of what it returns."""

    def __init__(self, part: nn.Module, function: Callable[[Any], Any]):
        super().__init__()
        self.part, self.function = part, function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.part(*args, **kwargs))


class Subclassed:
    """Stands before the class of a part."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output


class Counting(nn.Module):
    """Returns something else in every call."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part, self.calls = part, 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = self.part(*args, **kwargs)
        return (output[0] * self.calls, *output[1:]) if isinstance(output, tuple) else output * self.calls


def first(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda output: (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)


def fail(*_: Any) -> Any:
    raise KeyError("of the user")


def same_class(part: nn.Module, base: type) -> nn.Module:
    part.__class__ = type(type(part).__name__, (base, type(part)), {})
    return part


def doubled_by_hook(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda module, args, output: first(lambda tokens: 2 * tokens)(output))
    return part


def replaced_forward(part: nn.Module) -> nn.Module:
    forward = type(part).forward
    part.forward = lambda *args, **kwargs: first(lambda tokens: 2 * tokens)(forward(part, *args, **kwargs))
    return part


def observed(part: nn.Module) -> nn.Module:
    part.register_forward_hook(lambda module, args, output: None)
    return part


def with_attribute(value: Callable[[], Any]) -> Callable[[nn.Module], nn.Module]:
    def changed(part: nn.Module) -> nn.Module:
        part.of_user = value()
        return part

    return changed


def spectral(part: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(part) if isinstance(part, nn.Linear) else part


def pruned(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.Linear):
        prune.random_unstructured(part, "weight", 0.5)
    return part


def quantized(part: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(part.float(), {nn.Linear})


MODULES: dict[str, Callable[[nn.Module], Any]] = {
    "identity": lambda part: nn.Identity(),
    "absent": lambda part: None,
    "another linear map": lambda part: nn.Linear(12, 12).double(),
    "an rms norm": lambda part: nn.RMSNorm(12).double(),
    "a list": lambda part: nn.ModuleList([part]),
    "a sequence": lambda part: nn.Sequential(part),
    "a sequence with an activation": lambda part: nn.Sequential(part, nn.Tanh()),
    "wrapped": lambda part: Followed(part, lambda output: output),
    "followed by a square": lambda part: Followed(part, first(lambda tokens: tokens**2)),
    "followed by noise": lambda part: Followed(part, first(lambda tokens: tokens + torch.randn_like(tokens))),
    "followed by a mean over images": lambda part: Followed(part, first(lambda t: t - t.mean(0, keepdim=True))),
    "of single precision": lambda part: part.float(),
    "counting": Counting,
    "returns nothing": lambda part: Followed(part, lambda output: None),
    "returns other shapes": lambda part: Followed(part, first(lambda tokens: tokens[..., :-1])),
    "raises": lambda part: Followed(part, fail),
    "of a subclass": lambda part: same_class(part, Subclassed),
    "under a hook": doubled_by_hook,
    "under a hook that observes": observed,
    "another forward": replaced_forward,
    "in training mode": lambda part: part.train(),
    "with a dropout": lambda part: nn.Sequential(part, nn.Dropout(0.5)),
    "frozen": lambda part: part.requires_grad_(False),
    "on meta": lambda part: part.to("meta"),
    "with a lock": with_attribute(__import__("threading").Lock),
    "with a generator": with_attribute(lambda: (number for number in range(3))),
    "with a tensor of a graph": with_attribute(lambda: torch.ones(2, requires_grad=True) * 2),
    "spectral norm": spectral,
    "pruned": pruned,
    "quantized": quantized,
    "scripted": lambda part: torch.jit.script(part) if isinstance(part, nn.Linear | nn.LayerNorm) else part,
    "compiled": lambda part: torch.compile(part),
    "in parallel": nn.DataParallel,
}


# Changes of a whole model, and of the list of its blocks.


def blocks(model: nn.Module) -> tuple[nn.Module, str, Any]:
    """The parent, the name and the list of the blocks."""
    for path, part in model.named_modules():
        if (
            isinstance(part, nn.ModuleList | nn.Sequential)
            and len(part) == 2
            and "Block" in str(type(part[0])) + "Layer"
        ):
            above, _, name = path.rpartition(".")
            return model.get_submodule(above), name, part
    raise AssertionError("no blocks")


def reblocked(change: Callable[[list[nn.Module]], list[Any]]) -> Callable[[nn.Module], nn.Module]:
    def changed(model: nn.Module) -> nn.Module:
        _, _, found = blocks(model)
        made = change(list(found))
        names = list(found._modules)
        found._modules.clear()
        for position, block in enumerate(made):
            name = names[position] if position < len(names) else str(position)
            found._modules[name] = block
        return model

    return changed


def as_inference(model: nn.Module) -> nn.Module:
    with torch.inference_mode():
        for owner in model.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                delattr(owner, name)
                owner.register_parameter(name, nn.Parameter(parameter.detach().clone(), False))
    return model


WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "reversed": reblocked(lambda found: found[::-1]),
    "one block": reblocked(lambda found: found[:1]),
    "no block": reblocked(lambda found: []),
    "one block twice": reblocked(lambda found: [found[0], found[0]]),
    "three blocks": reblocked(lambda found: [*found, copy.deepcopy(found[0])]),
    "a norm between": reblocked(lambda found: [found[0], nn.LayerNorm(12).double(), found[1]]),
    "an absent block": reblocked(lambda found: [found[0], None]),
    "training": lambda model: model.train(),
    "frozen": lambda model: model.requires_grad_(False),
    "single precision": lambda model: model.float(),
    "complex": lambda model: model.to(torch.complex128),
    "meta": lambda model: model.to("meta"),
    "without parts": lambda model: nn.Module(),
    "inference tensors": as_inference,
    "wrapped": lambda model: Followed(model, lambda output: output),
    "in a sequence": lambda model: nn.Sequential(model),
    "with a softmax": lambda model: nn.Sequential(model, nn.Softmax(-1)),
    "in parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model),
    "traced": lambda model: torch.jit.trace(model, IMAGES, strict=False),
    "shared memory": lambda model: model.share_memory(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}

# Attributes: every public one of a simple type, of the model and of the parts of its first block.
VALUES: dict[str, Callable[[Any], Any]] = {
    "one more": lambda value: value + 1 if isinstance(value, int | float) else 1,
    "zero": lambda value: 0,
    "negative": lambda value: -1,
    "none": lambda value: None,
    "a text": lambda value: "3",
    "not": lambda value: not value,
    "nan": lambda value: float("nan"),
    "deleted": lambda value: DELETED,
}
DELETED = object()


def attributes(model: nn.Module) -> list[tuple[str, nn.Module, str, Any]]:
    return [
        (f"{path}.{name}".lstrip("."), part, name, value)
        for path, part in model.named_modules()
        if not is_inner(f"{path}.")
        for name, value in vars(part).items()
        if not name.startswith("_")
        and name != "training"
        and isinstance(value, bool | int | float | str | tuple | None)
    ]


def changes(library: str, kind: str) -> Iterator[tuple[str, Callable[[nn.Module], Any]]]:
    """Yields the path of a part, and a function that changes this part of a model and returns the model."""
    model = LIBRARIES[library][0]()
    sort, _, name = kind.partition(": ")
    if sort == "model":
        yield "", WHOLE[name]
        return
    listed: Any = {"tensor": parameters, "parameter": parameters, "part": parts, "attribute": attributes}[sort](model)
    for position, (path, *_) in enumerate(listed):

        def change(model: nn.Module, position: int = position, path: str = path) -> nn.Module:
            if sort == "part":
                _, parent, own, part = parts(model)[position]
                setattr(parent, own, MODULES[name](part))
            elif sort == "attribute":
                _, owner, own, value = attributes(model)[position]
                changed = VALUES[name](value)
                delattr(owner, own) if changed is DELETED else setattr(owner, own, changed)
            elif sort == "parameter":
                _, owner, own, parameter = parameters(model)[position]
                PLACES[name](model, owner, own, parameter, path)
            else:
                _, owner, own, parameter = parameters(model)[position]
                tensor = TENSORS[name](parameter.detach())
                setattr(owner, own, nn.Parameter(tensor, tensor.is_floating_point() or tensor.is_complex()))
            return model

        yield path, change


KINDS = [
    *(f"tensor: {name}" for name in TENSORS),
    *(f"parameter: {name}" for name in PLACES),
    *(f"part: {name}" for name in MODULES),
    *(f"attribute: {name}" for name in VALUES),
    *(f"model: {name}" for name in WHOLE),
]


def outputs(model: Any) -> Tensor | None:
    """The outputs of a model for the images in evaluation mode; None where it does not run."""
    try:
        with torch.no_grad():
            found = model.eval()(IMAGES.to(next(model.parameters()).dtype))
    except Exception:
        return None
    found = getattr(found, "logits", found)
    if any(not isinstance(tensor, Tensor) or tensor.is_meta for tensor in tensors_of(found).values() or [None]):
        return None
    return rows_of(found).double()  # a list of tensors is an output as well


FEATURES = ("block", "attention", "patch embedding", "projection", "channels", "added keys")


def is_named(kind: str, path: str, message: str) -> bool:
    """Whether a message names a part, one that contains it, the feature that it shows, or the part that raises.

    A change of the model itself is of no part, and a number of a wrong type may be read anywhere.
    """
    names = [name for name in path.split(".") if not name.isdigit()]
    is_read = kind.startswith("attribute") and "reading" in message
    found = any(word in message for word in (*names, *FEATURES)) or re.search(r"\S+ raises \w+", message)
    return len(names) < 2 or is_read or bool(found)


def judged(library: str, kind: str, path: str, change: Callable[[nn.Module], Any]) -> str | None:
    """Returns what is wrong with the treatment of a changed model; None if nothing is."""
    make, arguments = LIBRARIES[library]
    try:
        model = change(make())
    except Exception:  # torch refuses the change itself
        return None
    torch.manual_seed(0)
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, nn.Module) else []
    expected, again = outputs(model), outputs(model)
    for part, training in modes:
        part.training = training
    try:
        loaded = rx.load(model, **arguments)
        logits = outputs(loaded)
    except AttnrxError as error:
        return None if is_named(kind, path, str(error)) else f"not named: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if expected is None:
        return "loaded, though it does not run"
    if again is None or not torch.allclose(again, expected, rtol=1e-9, atol=1e-12, equal_nan=True):
        return "loaded, though it returns something else in every call"
    if logits is None or logits.shape != expected.shape:
        return "returns another shape"
    epsilon = max(torch.finfo(each.dtype).eps for each in (IMAGES.float(), next(model.parameters())))
    difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
    return None if difference <= epsilon**0.5 * max(1.0, largest) else f"differs by {difference:.3g}"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_model_is_copied_exactly_or_refused(library: str, kind: str) -> None:
    every = list(changes(library, kind))
    first = (KINDS.index(kind) + 2 * list(LIBRARIES).index(library)) % min(STEP, len(every))
    wrong = {path: found for path, change in every[first::STEP] if (found := judged(library, kind, path, change))}
    assert not wrong, wrong
