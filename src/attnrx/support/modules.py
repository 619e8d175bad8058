"""Modules of torch: copies, paths of parts, whether operations are recorded, values of weights, and trees of outputs.

A tree is several tensors in tuples, lists, mappings and libraries' output classes, as a module may return them.
"""

import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor

Module = TypeVar("Module", bound=nn.Module)
P = ParamSpec("P")
Value = TypeVar("Value")


class _DetachedCopies(TorchFunctionMode):
    """Copies tensors of a graph, which torch refuses to copy, as detached tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copy_module(model: Module, memo: dict[int, Any] | None = None) -> Module:
    """Returns a deep copy of a module; activations that its parts keep as attributes are detached in the copy.

    `memo` has objects that replace others in the copy, by their `id`, as in `copy.deepcopy`.

    Raises:
        NotSupported: An attribute cannot be copied, e.g. a lock or an open file; the message names it.
    """
    try:
        with _DetachedCopies():
            return copy.deepcopy(model, memo)
    except Exception as error:  # objects of any class are copied by their own code
        raise NotSupported(
            f"{type(model).__name__} cannot be copied: {_uncopied(model)} raises {type(error).__name__}: {error}. "
            "Delete this attribute first, and set it again on the result."
        ) from error


def _uncopied(model: nn.Module) -> str:
    """Returns the path and the type of the first attribute of a module that cannot be copied."""
    # Every part is its own copy here, so that each attribute is copied without the modules that it refers to.
    parts = {id(part): part for part in model.modules()}
    for name, part in model.named_modules():
        for attribute, value in vars(part).items():
            try:
                with _DetachedCopies():
                    copy.deepcopy(value, dict[int, Any](parts))
            except Exception:
                return f"its attribute {f'{name}.{attribute}'.lstrip('.')} ({type(value).__name__})"
    return "one of its parts"


def shared_weights(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Returns the weights of a module that have several names, with these names."""
    names = dict[nn.Parameter, list[str]]()
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)  # by identity, as torch hashes tensors
    return {weight: found for weight, found in names.items() if len(found) > 1}


def share_again_(module: nn.Module, names: Iterable[Sequence[str]]) -> None:
    """Shares one weight again between the names of each group, if their values are equal."""
    for first, *others in names:
        weight = module.get_parameter(first)
        for path, _, name in (other.rpartition(".") for other in others):
            owner = module.get_submodule(path)
            other = getattr(owner, name)
            if other.shape == weight.shape and (weight.is_meta or torch.equal(other, weight)):
                setattr(owner, name, weight)


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the weights of a module by tensors, without a copy.

    Names that share one weight still share it, if their tensors are equal.

    Raises:
        RuntimeError: The tensors do not fit.
    """
    names = shared_weights(module).values()
    module.load_state_dict(tensors, strict=True, assign=True)
    share_again_(module, names)


def require_gradient_(parameter: Tensor, requires_grad: bool) -> None:
    """Sets `requires_grad` of a parameter of any shape, even if it was made in inference mode."""
    with torch.inference_mode(parameter.is_inference()):
        parameter.requires_grad_(requires_grad)


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Sets evaluation mode and disables gradients; restores the mode of every module at the end."""
    models = tuple(models)
    # Stored by module: a model in training may have frozen parts in evaluation mode, which model.train() would change.
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        with torch.no_grad():
            for model in models:
                model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def trainable(module: nn.Module) -> Iterator[None]:
    """Lets gradients reach all parameters; afterwards frozen ones are frozen again, and none has a gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.numel()]
    flags = [parameter.requires_grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.requires_grad_()
        yield
    finally:
        for parameter, flag in zip(parameters, flags, strict=True):
            parameter.grad = None
            parameter.requires_grad_(flag)


def is_traced() -> bool:
    """Whether operations that run now become a graph of a compiler, an exporter or a trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_recorded() -> bool:
    """Whether operations that run now are recorded: for gradients, or in a graph."""
    return torch.is_grad_enabled() or is_traced()


class _Fixed(threading.local):
    values: dict[tuple[int, Hashable], Any] | None = None


_FIXED = _Fixed()


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Computes every value of `of_weights` once in the context; the weights must not change meanwhile.

    A graph that is recorded in the context after a run of the model has these values as constants, such as one matrix
    for query, key and value, in place of the operations that compute them.
    """
    before, _FIXED.values = _FIXED.values, {}
    try:
        yield
    finally:
        _FIXED.values = before


def has_fixed_weights() -> bool:
    """Whether this thread is in the context of `fixed_weights`."""
    return _FIXED.values is not None


def of_weights(owner: object, key: Hashable, build: Callable[[], Value]) -> Value:
    """Returns what `build` computes from the weights of a module, which has one such value for each `key`.

    It is computed in every call, so that it belongs to the present weights, however they were changed. On a CPU, a
    cache whose entries were verified by a hash of the weights saved less than 3 % of a pass (ViT-Tiny, EVA-02 and
    BEiT-B, batch 1 and 8, one thread of a Xeon with AVX-512, 2026-11-28).
    """
    values = _FIXED.values
    if values is None:
        return build()
    name = id(owner), key
    if name not in values:
        if is_recorded():  # the value is part of the graph, and must not be stored
            return build()
        with torch.inference_mode(mode=False), torch.no_grad():
            values[name] = build()
    return values[name]


def kept(build: Callable[P, Value]) -> Callable[P, Value]:
    """Keeps the tensors that a function returns, if they only depend on its arguments; in a graph it is called anew.

    On a GPU every new tensor is a kernel. A copy of numbers to it waits for it, and cannot be part of a CUDA graph.
    """
    # Outside inference mode, because gradients cannot be computed through an index that was made in it.
    returned: Any = lru_cache(maxsize=256)(torch.inference_mode(mode=False)(build))

    @wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> Value:
        # A tensor made during export is symbolic; a trace that reads a kept one would differ from one that makes it.
        return build(*args, **kwargs) if is_traced() else returned(*args, **kwargs)

    return call


def outermost(model: nn.Module, found: Callable[[nn.Module], Value | None]) -> Iterator[tuple[str, Value]]:
    """Yields the outermost parts for which `found` returns something: the path, and what it returned."""
    outer: list[str] = []
    for path, part in model.named_modules():
        if not any(path.startswith(f"{above}.") or not above for above in outer):
            value = found(part)
            if value is not None:
                outer.append(path)
                yield path, value


def containing(paths: Sequence[str]) -> Iterator[str]:
    """Yields the paths of the modules that contain all of these parts, from the smallest to the model itself, ""."""
    pieces = [path.split(".") for path in paths]
    for count in range(min(map(len, pieces)) - 1, -1, -1):
        if len({tuple(each[:count]) for each in pieces}) == 1:
            yield ".".join(pieces[0][:count])


def random_images(model: nn.Module, shape: Sequence[int], count: int = 2) -> Float[Tensor, "count *shape"]:
    """Returns the same normal images of a shape in every call, in the dtype and on the device of the parameters.

    They are drawn on the CPU in float64, so that they are the same on every device and up to rounding in every dtype.
    On the meta device they have no values.
    """
    parameter = next(model.parameters())
    if parameter.is_meta:
        return parameter.new_empty(count, *shape)
    inputs = getattr(model, "attnrx_inputs", None)  # `vit.models.module_inputs`
    if inputs is not None and not inputs.is_plain:
        return inputs.random(parameter, count)
    generator = torch.Generator().manual_seed(0)
    return torch.randn((count, *shape), generator=generator, dtype=torch.float64, device="cpu").to(parameter)


def rounding_limits(expected: Float[Tensor, "batch *sizes"]) -> Float[Tensor, "batch *sizes"]:
    """Returns, for every output, the largest difference that is taken for rounding.

    It is the square root of the machine epsilon, relative to the output's column, so that a large constant beside small
    logits hides nothing. A column has all images and all other places of one index: of a class, a channel or a row. A
    column of small numbers may round as most columns do: the least limit is above a quarter of all columns. The epsilon
    is at least float32's, because some attention computes its softmax in float32.
    """
    epsilon = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    sizes = expected.detach().abs().double()
    if not sizes.numel():
        return sizes
    if sizes.ndim < 2:
        columns = sizes.amax().expand(sizes.shape)
    else:
        others = [[axis for axis in range(sizes.ndim) if axis != kept] for kept in range(1, sizes.ndim)]
        columns = sizes.amax(others[0], keepdim=True)
        for axes in others[1:]:
            columns = torch.minimum(columns, sizes.amax(axes, keepdim=True))
    ordered = columns.flatten().sort().values
    least = max(float(ordered[(len(ordered) - 1) // 4]), LEAST_SCALE)
    return (epsilon**0.5 * columns.clamp(min=least)).expand(sizes.shape)


# Rounding is relative to the size of outputs, but at least to this size.
LEAST_SCALE = 1e-3


# Trees ----------------------------------------------------------------------------------------------------------------


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns the tree with `function(tensor, ...)` in place of every tensor; other values stay.

    Args:
        function: Receives a tensor of the tree and the others' tensors in the same place.
        tree: Tensors in tuples, lists and mappings.
        *others: Trees of the same structure.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        items = {key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()}
        # The output classes of transformers are dataclasses, which take their fields as keywords.
        return type(tree)(items) if type(tree) is dict else type(tree)(**items)
    if isinstance(tree, tuple | list):
        values = [mapped(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_of(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Returns the tensors of floating-point numbers in a tree by their place in it, e.g. `depth` or `heads.0`."""
    if isinstance(tree, Tensor):
        return {name: tree} if tree.is_floating_point() else {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, tuple | list) else ()
    return {
        place: tensor for key, value in items for place, tensor in tensors_of(value, f"{name}.{key}".strip(".")).items()
    }


def joined(trees: Sequence[Any]) -> Any:
    """Returns the tree for all images from the trees of the parts of a batch."""
    return mapped(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def from_rows(rows: Float[Tensor, "images numbers"], template: Any) -> Any:
    """Returns the tree whose numbers `rows_of` put into rows; `template` is the tree of one image."""
    sizes = [tensor[0].numel() for tensor in tensors_of(template).values()]
    parts = iter(rows.split(sizes, dim=1))
    return mapped(
        lambda tensor: next(parts).reshape(-1, *tensor.shape[1:]) if tensor.is_floating_point() else tensor, template
    )


def rows_of(tree: Any) -> Float[Tensor, "images numbers"]:
    """Returns all numbers of every image in one row; an output that has one row per image is returned as it is."""
    if isinstance(tree, Tensor) and tree.ndim == 2:
        return tree
    # Not flattened: a tensor may have one number per image.
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors_of(tree).values()], dim=1)
