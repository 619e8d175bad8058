"""Code that was added to the parts of a model: replaced forward methods, hooks, and reparametrized weights.

A deep copy of a model shares functions with it, and so the modules that a function holds in its closure: the copy would
run those of the original.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from attnrx.support.errors import NotSupported
from attnrx.support.modules import copy_module, random_images
from attnrx.support.shapes import Tensor
from attnrx.vit.models.observation_hooks import evaluating

# Functions of these packages are no changes by a user.
LIBRARIES = ("attnrx", "attnrx_lab", "torch", "timm", "transformers", "torchvision", "open_clip")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def require_uncompiled(model: nn.Module) -> None:
    """Raises NotSupported for a model of which a part was compiled, except in place (`nn.Module.compile`)."""
    for name, part in model.named_modules():
        values = (value for key, value in vars(part).items() if key != "_compiled_call_impl")
        # A module by the name of its package, because importing torch._dynamo takes a second; functions by a mark.
        is_compiled = type(part).__module__.startswith("torch._dynamo")
        if is_compiled or any(hasattr(value, "_torchdynamo_orig_callable") for value in values):
            raise NotSupported(
                f"{_path(name)} was compiled by torch.compile: load the model before it is compiled, and compile the "
                "result."
            )


def require_own_weights(copy: nn.Module, original: nn.Module, input_shape: tuple[int, int, int]) -> None:
    """Raises NotSupported where the forward pass of a deep copy uses a weight of the original.

    A function of one part (a replaced `forward`, a hook) may hold a part or a weight of the model in its closure, its
    defaults or its global variables, of which a deep copy has no copies. Bound methods and partial functions are
    copied.

    Args:
        copy: The copy, which is called with images.
        original: The model with the weights that the copy must not use.
        input_shape: Channels, height and width of an image.
    """
    names = {id(tensor): name for name, tensor in (*original.named_parameters(), *original.named_buffers())}
    parameter = next(copy.parameters(), None)
    if parameter is None or parameter.is_meta:
        return
    images = parameter.new_zeros(1, *input_shape)
    # With gradients, so that no kernel replaces the calls of parts, whose own code is run by every training.
    with evaluating([copy]), torch.enable_grad(), _TensorUses(names) as uses:
        copy(images)
    if uses.found:
        raise NotSupported(
            f"a copy of {type(original).__name__} would use {uses.found[0]} of the original: a function (a replaced "
            "forward, a hook) holds that part, and copies share functions. Remove it (del part.forward, or "
            "handle.remove()), or make the change in the class of the part."
        )


class _TensorUses(TorchFunctionMode):
    """Records which of the tensors, named by their `id`, are arguments of operations."""

    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self.names = names
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if id(tensor) in self.names:
                    self.found.append(self.names[id(tensor)])
        return func(*args, **(kwargs or {}))


def _path(name: str) -> str:
    return name or "the model itself"


def plain_copy(model: nn.Module) -> nn.Module:
    """Returns a deep copy whose weights are plain parameters: masks of pruning, weight norms, spectral norms and other
    parametrizations are applied to the weights and removed.
    """
    copy = copy_module(model)
    with evaluating([copy]):  # spectral norms change their vectors in training mode
        for part in list(copy.modules()):
            if parametrize.is_parametrized(part):
                _remove_parametrizations_(part)
            for hook in list(part._forward_pre_hooks.values()):
                if isinstance(hook, prune.BasePruningMethod):
                    prune.remove(part, hook._tensor_name)
                elif isinstance(hook, WeightNorm):
                    remove_weight_norm(part, hook.name)
                elif isinstance(hook, SpectralNorm):
                    remove_spectral_norm(part, hook.name)
    return copy


def _remove_parametrizations_(part: nn.Module) -> None:
    # Not by torch's remove_parametrizations, which changes the class that the original shares with its copy.
    parametrizations = part._modules.pop("parametrizations")
    assert isinstance(parametrizations, nn.ModuleDict)
    weights = {name: parametrizations[name]() for name in parametrizations}
    (part.__class__,) = type(part).__bases__  # the class of the part before it was parametrized
    for name, weight in weights.items():
        is_trained = any(parameter.requires_grad for parameter in parametrizations[name].parameters())
        part.register_parameter(name, nn.Parameter(weight.detach().clone(), is_trained))


def reparametrized(model: nn.Module) -> Iterator[str]:
    """Yields the names of the weights that are computed from other tensors at every use."""
    for path, part in model.named_modules():
        names = []
        if parametrize.is_parametrized(part):
            names += list(part.parametrizations)  # type: ignore[arg-type]
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, prune.BasePruningMethod):
                names.append(hook._tensor_name)
            elif isinstance(hook, WeightNorm | SpectralNorm):
                names.append(hook.name)
        yield from (f"{path}.{name}".lstrip(".") for name in names)


def require_plain_weights(model: nn.Module) -> None:
    """Raises NotSupported for a model with a weight that is computed from other tensors."""
    computed = next(reparametrized(model), None)
    if computed is not None:
        raise NotSupported(
            f"{computed} is computed from other tensors (a mask of pruning, a weight norm, a spectral norm or another "
            "parametrization): make it permanent, e.g. by torch.nn.utils.prune.remove(part, 'weight')."
        )


def require_unchanged(model: nn.Module, run: Callable[[Tensor], Tensor], input_shape: tuple[int, int, int]) -> None:
    """Raises NotSupported if hooks or replaced `forward` methods of users change what `run`, which runs the model,
    returns for images of this shape; those that only observe are allowed.

    Such changes are no part of a saved model, and are lost with the parts that a verb replaces.
    """
    parts = added_code(model)
    parameter = next(model.parameters(), None)
    if not parts or parameter is None or parameter.is_meta:
        return
    require_uncompiled(model)
    images = random_images(model, input_shape)
    with evaluating([model]):
        actual = run(images)
        with without_added_code(model):
            expected = run(images)
    # Up to rounding, because hooks switch fused kernels off.
    epsilon = max(torch.finfo(parameter.dtype).eps, torch.finfo(torch.float32).eps)
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.shape == expected.shape:
        difference = float((actual - expected).abs().max())
        if difference <= epsilon**0.5 * max(1.0, float(expected.abs().max())):
            return
    raise NotSupported(
        f"a hook or a replaced forward of {', '.join(map(_path, parts[:4]))} changes the outputs of "
        f"{type(model).__name__}. It would be lost where parts are replaced, and when the model is saved: remove it "
        "(handle.remove(), or del part.forward), or make the change in the class of the part before attnrx.load."
    )


def added_code(model: nn.Module) -> list[str]:
    """Returns the parts whose `forward` was replaced on the instance, or that have a hook of a user's."""
    return [name for name, part in model.named_modules() if "forward" in vars(part) or any(_added_hooks(part))]


def _added_hooks(part: nn.Module) -> Iterator[int]:
    for hooks in (part._forward_pre_hooks, part._forward_hooks):
        for key, hook in hooks.items():
            if _package(hook) not in LIBRARIES:
                yield key


def _package(function: Any) -> str:
    """Returns the package in which a function, or the class of an object that is called, was defined."""
    while isinstance(function, functools.partial):
        function = function.func
    return (getattr(function, "__module__", None) or type(function).__module__).split(".")[0]


@contextmanager
def without_added_code(model: nn.Module) -> Iterator[None]:
    """Removes replaced `forward` methods and hooks of users inside the context."""
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    for part in model.modules():
        kept.append((part, {name: vars(part)[name] for name in ("forward", *HOOKS) if name in vars(part)}))
        added = set(_added_hooks(part))
        vars(part).pop("forward", None)
        for name in HOOKS if added else ():
            # The same type, in whose order the hooks run.
            hooks = getattr(part, name)
            vars(part)[name] = type(hooks)((key, hook) for key, hook in hooks.items() if key not in added)
    try:
        yield
    finally:
        for part, attributes in kept:
            vars(part).update(attributes)
