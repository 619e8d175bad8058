"""Parts that a user put in place of a library's own, usually the head of a fine-tuned model, as JSON and back."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from attnrx.support.arguments import described_error
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor

# The layers that are described: their arguments are attributes of the same names. Not those that end in probabilities
# (Softmax, Sigmoid), because outputs are compared as logits.
LAYERS = {
    layer.__name__: layer
    for layer in (
        nn.Identity, nn.Linear, nn.Flatten, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d,
        nn.GELU, nn.ReLU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Hardswish, nn.Mish,
    )
}  # fmt: skip


def describe_part(module: nn.Module) -> dict[str, Any] | None:
    """Returns the class and the arguments of one of LAYERS, or of an nn.Sequential of them; None for other modules."""
    if type(module) is nn.Sequential:
        parts = {name: describe_part(part) for name, part in module.named_children()}
        return None if None in parts.values() else {"layer": "Sequential", "parts": parts}
    layer = LAYERS.get(type(module).__name__)
    if type(module) is not layer:  # also a class of the same name from elsewhere
        return None
    arguments = {}
    for name in inspect.signature(layer.__init__).parameters:
        if name in ("self", "args", "kwargs", "device", "dtype"):
            continue
        value = getattr(module, name, None)
        # The argument `bias` says whether there is one.
        arguments[name] = value is not None if name == "bias" else list(value) if isinstance(value, tuple) else value
    described = {"layer": type(module).__name__, "arguments": arguments}
    # An option that is no attribute of its layer would be lost.
    return described if repr(build_part(described)) == repr(module) else None


def build_part(described: Mapping[str, Any]) -> nn.Module:
    """Returns a new module of this description, of which a file may be the source.

    Raises:
        InvalidInput: It is not one that `describe_part` returns.
    """
    try:
        if described["layer"] == "Sequential":
            built = nn.Sequential()
            for name, part in described["parts"].items():
                built.add_module(name, build_part(part))
            return built
        return LAYERS[described["layer"]](**described["arguments"])
    except Exception as error:  # torch raises errors of many types for wrong arguments
        raise InvalidInput(
            f"{described!s:.200} describes no layer of {', '.join(LAYERS)} or Sequential: {described_error(error)}."
        ) from error


def replaced_parts(model: nn.Module, rebuilt: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the parts of a model that differ from those of the rebuilt one, described by their paths.

    {} if a part that differs cannot be described, or is the model itself.
    """
    parts = {path: describe_part(model.get_submodule(path)) for path in _differing(model, rebuilt) if path}
    return {} if None in parts.values() else {path: part for path, part in parts.items() if part is not None}


def _differing(model: nn.Module, rebuilt: nn.Module, path: str = "") -> Iterator[str]:
    """Yields the paths of the parts that differ by themselves, without those inside them."""
    children, others = dict(model.named_children()), dict(rebuilt.named_children())
    if _own(model) != _own(rebuilt) or children.keys() != others.keys():
        yield path
        return
    for name, child in children.items():
        yield from _differing(child, others[name], f"{path}.{name}".lstrip("."))


def _own(module: nn.Module) -> tuple[object, ...]:
    """Returns what a module is without its children: its class, its text, and the shapes of its tensors."""
    tensors: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    shapes = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}
    return type(module), module.extra_repr(), shapes
