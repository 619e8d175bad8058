"""Code that was added to the parts of a model: replaced forward methods, hooks, reparametrized weights and adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from attnrx.support.errors import NotSupported
from attnrx.support.modules import random_images, rounding_limit
from attnrx.support.shapes import Tensor
from attnrx.vit.models.observation_hooks import evaluating

# Functions of these packages are no changes by a user.
LIBRARIES = ("attnrx", "attnrx_lab", "torch", "timm", "transformers", "torchvision", "open_clip")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Hooks that compute a weight from other tensors before every call.
COMPUTING = (prune.BasePruningMethod, WeightNorm, SpectralNorm)


def require_copyable_code(model: nn.Module) -> None:
    """Raises NotSupported for a model of which a part was compiled, except in place (`nn.Module.compile`), or has a
    `forward` of its own that a copy would share, and which may run parts of the original. Bound methods and partial
    functions are copied.
    """
    for name, part in model.named_modules():
        if type(part).__module__.startswith("torch._dynamo"):  # importing it takes a second
            raise NotSupported(
                f"{_path(name)} was compiled by torch.compile: load the model before it is compiled, and compile the "
                "result."
            )
        if not isinstance(vars(part).get("forward"), MethodType | partial | None):
            raise NotSupported(
                f"the forward of {_path(name)} was replaced by a function, which a copy would share: remove it (del "
                "part.forward), or make the change in the class of the part."
            )


def _path(name: str) -> str:
    return name or "the model itself"


def require_plain_weights(model: nn.Module) -> None:
    """Raises NotSupported for a model with adapters of PEFT, or with a weight that is computed from other tensors."""
    for path, part in model.named_modules():
        # By name, because importing PEFT takes seconds.
        if any(base.__module__.startswith("peft.") for base in type(part).__mro__):
            raise NotSupported(
                f"{_path(path)} has adapters of PEFT: give the model with the adapters in its weights, "
                "model.merge_and_unload()."
            )
        hooks = part._forward_pre_hooks.values()
        if parametrize.is_parametrized(part) or any(isinstance(hook, COMPUTING) for hook in hooks):
            raise NotSupported(
                f"a weight of {_path(path)} is computed from other tensors (a mask of pruning, a weight norm, or "
                "another parametrization): make it permanent, e.g. by torch.nn.utils.prune.remove(part, "
                "'weight') or torch.nn.utils.parametrize.remove_parametrizations(part, 'weight')."
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
    images = random_images(model, input_shape)
    with evaluating([model]):
        actual = run(images)
        with without_added_code(model):
            expected = run(images)
    # Up to rounding, because hooks switch fused kernels off.
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.shape == expected.shape:
        if float((actual - expected).abs().max()) <= rounding_limit(expected):
            return
    raise NotSupported(
        f"a hook or a replaced forward of {', '.join(map(_path, parts[:4]))} changes the outputs of "
        f"{type(model).__name__}. It would be lost where parts are replaced, and when the model is saved: remove it "
        "(handle.remove(), or del part.forward), or make the change in the class of the part before attnrx.load."
    )


def added_code(model: nn.Module) -> list[str]:
    """Returns the parts whose `forward` was replaced on the instance, or that have a hook of a user's."""
    return [name for name, part in model.named_modules() if "forward" in vars(part) or list(_added_hooks(part))]


def _added_hooks(part: nn.Module) -> Iterator[int]:
    for hooks in (part._forward_pre_hooks, part._forward_hooks):
        for key, hook in hooks.items():
            if _package(hook) not in LIBRARIES:
                yield key


def _package(function: Any) -> str:
    """Returns the package in which a function, or the class of an object that is called, was defined."""
    while isinstance(function, partial):
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
