"""Code that was added to the parts of a model: replaced forward methods, hooks, reparametrized weights and adapters.

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
from attnrx.support.modules import copy_module, outermost, random_images, rounding_limit
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
    images = random_images(copy, input_shape, 1)
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


def merged(model: nn.Module) -> nn.Module:
    """Returns a deep copy whose weights are plain parameters, or the model itself if they are already.

    Masks of pruning, weight norms, spectral norms and other parametrizations are applied to the weights; adapters are
    merged: models of PEFT by PEFT, and any other part around a linear map, or of a subclass of it, that computes a
    linear map.

    Raises:
        NotSupported: A model of PEFT cannot be merged, e.g. one with a learned prompt.
    """
    if not (any(reparametrized(model)) or any(_peft_parts(model)) or any(_with_adapters(model))):
        return model
    holder = nn.Sequential(copy_module(model))  # a model of PEFT may be the whole
    with evaluating([holder]):  # spectral norms change their vectors in training mode
        for path in _peft_parts(holder):
            holder.set_submodule(path, _without_peft(holder.get_submodule(path)))
        for part in list(holder.modules()):
            if parametrize.is_parametrized(part):
                _remove_parametrizations_(part)
            for name, remove in list(_computed_by_hooks(part)):
                remove(part, name)
        for path, base in list(_with_adapters(holder)):
            holder.set_submodule(path, _as_linear(holder.get_submodule(path), base))
    return holder[0].train(model.training) if type(holder[0]) is not type(model) else holder[0]


def _peft_parts(model: nn.Module) -> list[str]:
    """Returns the paths of the outermost models of PEFT, and of its parts that hold two versions of a module."""

    def of_peft(part: nn.Module) -> set[str] | None:
        # By name, because importing PEFT takes seconds.
        names = {base.__name__ for base in type(part).__mro__ if base.__module__.startswith("peft.")}
        return names & {"PeftModel", "PeftMixedModel", "BaseTuner", "AuxiliaryTrainingWrapper"} or None

    return [path for path, _ in outermost(model, of_peft)]


def without_wrapper(model: Any) -> nn.Module:
    """Returns the module in a model of PEFT, with its adapters; any other model as it is."""
    is_of_peft = type(model).__module__.startswith("peft.")
    return model.get_base_model() if is_of_peft and hasattr(model, "get_base_model") else model


def _without_peft(part: Any) -> nn.Module:
    """Returns the module in a model or a wrapper of PEFT, with its adapters merged."""
    if hasattr(part, "original_module"):
        active = list(part.active_adapters)
        return part.modules_to_save[active[0]] if active and not part.disable_adapters else part.original_module
    try:
        return part.merge_and_unload()
    except Exception as error:  # adapters that are no change of weights raise errors of several types
        kind = getattr(part, "peft_type", type(part).__name__)
        raise NotSupported(
            f"the adapters of PEFT of the type {getattr(kind, 'value', kind)} cannot be merged into the weights: "
            f"merge_and_unload raises {type(error).__name__}: {error}. Give the model without them."
        ) from error


def _with_adapters(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Returns the paths of the parts that compute a linear map by more weights than those of one, and the linear map in
    each that has the same shape.
    """
    # A class that computes something else once is not called again: blocks repeat.
    others: set[type] = set()

    def adapted(part: nn.Module) -> nn.Linear | None:
        base = None if type(part) in others else _base_of(part)
        if base is not None and not _is_linear(part, base):
            others.add(type(part))
            return None
        return base

    return outermost(model, adapted)


def _base_of(part: nn.Module) -> nn.Linear | None:
    """Returns the linear map that a part may be an adapter of: itself, or its largest child, with weights beside it."""
    if isinstance(part, nn.Linear):
        own = type(part).__module__.split(".")[0] in ("torch", "attnrx")
        return None if own or type(part).forward is nn.Linear.forward or part.weight.is_meta else part
    linears = [child for child in part.children() if isinstance(child, nn.Linear)]
    base = max(linears, key=lambda child: child.weight.numel(), default=None)
    if base is None or isinstance(part, nn.Sequential | nn.ModuleList) or base.weight.is_meta:
        return None
    beside = sum(parameter.numel() for parameter in part.parameters()) - sum(map(torch.numel, base.parameters()))
    return base if 0 < beside < base.weight.numel() else None


def _is_linear(part: nn.Module, base: nn.Linear) -> bool:
    """Whether a part maps tokens as a linear map of the shape of `base`, plus a bias."""
    tokens = torch.randn(3, base.in_features, generator=torch.Generator().manual_seed(0), device="cpu")
    tokens[1] = 0  # f(a + b) = f(a) + f(b) - f(0)
    rows = torch.cat([tokens, tokens[:1] + tokens[2:]])[None].to(base.weight)
    with evaluating([part]), torch.random.fork_rng(devices=[]):
        try:
            output = part(rows)
        except Exception:  # the code of a module raises errors of any type
            return False
    if not isinstance(output, Tensor) or output.shape != (1, 4, base.out_features):
        return False
    first, zero, second, total = output[0].double()
    difference = (first + second - zero - total).abs().max()
    return bool(difference <= torch.finfo(base.weight.dtype).eps ** 0.5 * output.abs().max())


def _as_linear(part: nn.Module, base: nn.Linear) -> nn.Linear:
    """Returns the linear map that a part computes."""
    exact = copy_module(part).double()
    with evaluating([exact]):
        rows = torch.eye(base.in_features, dtype=torch.float64, device=base.weight.device)
        outputs = exact(torch.cat([rows.new_zeros(1, len(rows)), rows])[None])[0]
    weight, bias = (outputs[1:] - outputs[0]).T, outputs[0]
    has_bias = base.bias is not None or bool(bias.any())
    with torch.device("meta"):
        linear = nn.Linear(base.in_features, base.out_features, has_bias)
    is_trained = any(parameter.requires_grad for parameter in part.parameters())
    linear.weight = nn.Parameter(weight.to(base.weight.dtype).contiguous(), is_trained)
    if has_bias:
        linear.bias = nn.Parameter(bias.to(base.weight.dtype), is_trained)
    return linear.train(part.training)


def _remove_parametrizations_(part: nn.Module) -> None:
    # Not by torch's remove_parametrizations, which changes the class that the original shares with its copy.
    parametrizations = part._modules.pop("parametrizations")
    assert isinstance(parametrizations, nn.ModuleDict)
    weights = {name: parametrizations[name]() for name in parametrizations}
    (part.__class__,) = type(part).__bases__  # the class of the part before it was parametrized
    for key, hook in list(part._load_state_dict_pre_hooks.items()):
        # That of a weight norm, for older checkpoints, which cannot be pickled.
        if getattr(getattr(hook, "hook", hook), "__module__", "").startswith("torch.nn.utils"):
            del part._load_state_dict_pre_hooks[key]
    for name, weight in weights.items():
        is_trained = any(parameter.requires_grad for parameter in parametrizations[name].parameters())
        part.register_parameter(name, nn.Parameter(weight.detach().clone(), is_trained))


def _computed_by_hooks(part: nn.Module) -> Iterator[tuple[str, Callable[[nn.Module, str], object]]]:
    """Yields the weights that hooks compute, and what removes such a hook."""
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            yield hook._tensor_name, prune.remove
        elif isinstance(hook, WeightNorm | SpectralNorm):
            yield hook.name, remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm


def reparametrized(model: nn.Module) -> Iterator[str]:
    """Yields the names of the weights that are computed from other tensors at every use."""
    for path, part in model.named_modules():
        names = list(part.parametrizations) if parametrize.is_parametrized(part) else []  # type: ignore[arg-type]
        names += [name for name, _ in _computed_by_hooks(part)]
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
