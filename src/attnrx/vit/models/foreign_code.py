"""Code that was added to the parts of a model: replaced forward methods, hooks, and reparametrized weights.

A deep copy of a model shares functions with it, and so the modules that a function holds in its closure: the copy would
run those of the original.
"""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from attnrx.support.errors import NotSupported
from attnrx.support.modules import copy_module
from attnrx.support.shapes import Tensor
from attnrx.vit.models.observation_hooks import evaluating

# Functions of these packages are no changes by a user.
OWN = ("attnrx", "attnrx_lab")
LIBRARIES = (*OWN, "torch", "timm", "transformers", "torchvision", "open_clip")
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# The modules and tensors of a part, which are copied, and what `nn.Module.compile` adds, which its copy lacks.
NOT_COPIED = ("_parameters", "_buffers", "_modules", "_compiled_call_impl")
MOST_OBJECTS = 20_000  # that the search for held modules visits


def require_own_code(model: nn.Module) -> None:
    """Raises NotSupported where a function of one part (a replaced `forward`, a hook) holds a part or a weight of the
    model in its closure, its defaults or the global variables that it uses, or where a part was compiled.

    Bound methods and partial functions are allowed, because their copies hold the copied modules.
    """
    names: dict[int, str] = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names |= {id(part): name for name, part in model.named_modules()}
    visited: set[int] = set()
    for name, part in model.named_modules():
        if type(part).__module__.startswith("torch._dynamo"):  # by name: importing it takes a second
            raise NotSupported(
                f"{_path(name)} was compiled by torch.compile: load the model before it is compiled, and compile the "
                "result."
            )
        for attribute, value in vars(part).items():
            for function in () if attribute in NOT_COPIED else _functions(value, visited):
                held = _held(function, names)
                if held is not None:
                    what = "a hook" if attribute.endswith("_hooks") else f"the attribute {attribute!r}"
                    raise NotSupported(
                        f"{what} of {_path(name)} runs the function {function.__qualname__}, which holds "
                        f"{_path(held)} of the same model: a copy of the model would still run that part of the "
                        "original. Remove it, or make the change in the class of the part."
                    )


def _path(name: str) -> str:
    return name or "the model itself"


def _functions(value: Any, visited: set[int]) -> Iterator[types.FunctionType]:
    """Yields the functions inside a value, which its deep copy shares with it."""
    pending = [value]
    while pending and len(visited) < MOST_OBJECTS:
        current = pending.pop()
        # Modules are parts of the model, or copied with it.
        if id(current) in visited or isinstance(current, nn.Module | Tensor):
            continue
        visited.add(id(current))
        if isinstance(current, types.FunctionType):
            if _package(current) not in OWN:
                yield current
        else:
            pending += _references(current)


def _held(function: types.FunctionType, names: Mapping[int, str]) -> str | None:
    """Returns the name of a module or a tensor in `names` to which a function refers."""
    pending, visited = [function], set[int]()
    while pending and len(visited) < MOST_OBJECTS:
        current = pending.pop()
        if id(current) in names:
            return names[id(current)]
        if id(current) not in visited and not isinstance(current, Tensor):
            visited.add(id(current))
            pending += _references(current)
    return None


def _references(value: Any) -> Iterable[Any]:
    """Returns the objects to which an object refers and which its code may use."""
    if isinstance(value, types.FunctionType):
        return _references_of_function(value)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, nn.Module):
        return value.children()
    is_object = hasattr(value, "__dict__") and not isinstance(value, types.ModuleType | type)
    return vars(value).values() if is_object else ()


def _references_of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that is not assigned yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from vars(function).values()
    # Only modules and functions: the name of any other global variable may be that of an attribute.
    for name in _global_names(function.__code__):
        found = function.__globals__.get(name)
        if isinstance(found, nn.Module | types.FunctionType):
            yield found


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


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
    require_own_code(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((2, *input_shape), generator=generator, dtype=torch.float64, device="cpu").to(parameter)
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
