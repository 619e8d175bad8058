"""Functions for torch modules: copies, tied weights, modes, cached values, submodule paths, and trees of outputs.

A tree is anything that a module may return: a tensor, or tensors in tuples, lists, mappings or a library's output
class.
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
    """A mode in which `copy.deepcopy` detaches tensors of an autograd graph, which torch refuses to copy."""

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
    """Returns a deep copy of a module. Activations that the module stores as attributes are detached in the copy.

    As in `copy.deepcopy`, `memo` maps the `id` of an object to the object that replaces it in the copy.

    Raises:
        NotSupported: An attribute cannot be copied, e.g. a lock or an open file. The message names it.
    """
    try:
        with _DetachedCopies():
            return copy.deepcopy(model, memo)
    except Exception as error:  # a class may copy its objects by its own code, which may raise any error
        raise NotSupported(
            f"{type(model).__name__} cannot be copied: {_uncopied(model)} raises {type(error).__name__}: {error}. "
            "Delete this attribute first, and set it again on the result."
        ) from error


def _uncopied(model: nn.Module) -> str:
    """Returns the path and the type of the first attribute of a module that cannot be copied."""
    # With all modules in the memo, an attribute is copied without the modules that it refers to.
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
    """Returns the weights of a module that have several names (tied weights), with their names."""
    names = dict[nn.Parameter, list[str]]()
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)  # by identity, because torch hashes tensors by identity
    return {weight: found for weight, found in names.items() if len(found) > 1}


def share_again_(module: nn.Module, names: Iterable[Sequence[str]]) -> None:
    """Ties weights again: all names in a group share one weight, if their values are equal."""
    for first, *others in names:
        weight = module.get_parameter(first)
        for path, _, name in (other.rpartition(".") for other in others):
            owner = module.get_submodule(path)
            other = getattr(owner, name)
            if other.shape == weight.shape and (weight.is_meta or torch.equal(other, weight)):
                setattr(owner, name, weight)


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the weights of a module by the given tensors, without copying the tensors.

    Tied weights, i.e. weights with several names, stay tied if their new tensors are equal.

    Raises:
        RuntimeError: The names or shapes of the tensors differ from the module's weights.
    """
    names = shared_weights(module).values()
    module.load_state_dict(tensors, strict=True, assign=True)
    share_again_(module, names)


def require_gradient_(parameter: Tensor, requires_grad: bool) -> None:
    """Sets `requires_grad` of a parameter of any shape, even if the parameter was created in inference mode."""
    with torch.inference_mode(parameter.is_inference()):
        parameter.requires_grad_(requires_grad)


@contextmanager
def evaluating(models: Iterable[nn.Module]) -> Iterator[None]:
    """Sets models to evaluation mode and disables gradients within the context. Restores every module's mode."""
    models = tuple(models)
    # Modes are stored per module, because model.train() would also change parts that were in evaluation mode.
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
    """Enables gradients of all parameters within the context, then restores `requires_grad` and deletes gradients."""
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
    """Whether a compiler, an exporter or a trace is recording the current operations as a graph."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_recorded() -> bool:
    """Whether the current operations are recorded, either for gradients or as a graph."""
    return torch.is_grad_enabled() or is_traced()


class _Fixed(threading.local):
    values: dict[tuple[int, Hashable], Any] | None = None


_FIXED = _Fixed()


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Caches the results of `of_weights` within the context, in which the weights must not change.

    An example is the fused weight matrix of query, key and value. If you run the model and then record a graph within
    the context, the graph contains the cached results as constants. Without the context, the graph contains the
    operations that compute these results.
    """
    before, _FIXED.values = _FIXED.values, {}
    try:
        yield
    finally:
        _FIXED.values = before


def has_fixed_weights() -> bool:
    """Whether this thread is within the context of `fixed_weights`."""
    return _FIXED.values is not None


def of_weights(owner: object, key: Hashable, build: Callable[[], Value]) -> Value:
    """Returns the value that `build` computes from the weights of `owner`.

    An owner may have several values, each with its own `key`. Outside `fixed_weights`, the value is computed in every
    call, so it always matches the current weights. A cache that verifies its entries by a hash of the weights would
    save less than 3 % of a pass on a CPU (ViT-Tiny, EVA-02 and BEiT-B, batch 1 and 8, one thread of a Xeon with
    AVX-512, 2026-11-28).
    """
    values = _FIXED.values
    if values is None:
        return build()
    name = id(owner), key
    if name not in values:
        if is_recorded():  # the value belongs to the recorded graph, so it must not be cached
            return build()
        with torch.inference_mode(mode=False), torch.no_grad():
            values[name] = build()
    return values[name]


def kept(build: Callable[P, Value]) -> Callable[P, Value]:
    """Returns a function that caches the tensors that `build` creates. They must only depend on the arguments.

    Without the cache, every new tensor would need a kernel launch on a GPU. Copying numbers to the tensor would wait
    for the GPU, and could not be a part of a CUDA graph. While a graph is traced, `build` is called without the cache.
    """
    # Inference mode is off, because gradients cannot be computed through an index that was created in inference mode.
    returned: Any = lru_cache(maxsize=256)(torch.inference_mode(mode=False)(build))

    @wraps(build)
    def call(*args: P.args, **kwargs: P.kwargs) -> Value:
        # Tensors that are created during an export are symbolic, so they cannot be cached. A trace must not use a
        # cached tensor either, because it would differ from a trace that creates the tensor.
        return build(*args, **kwargs) if is_traced() else returned(*args, **kwargs)

    return call


def outermost(model: nn.Module, found: Callable[[nn.Module], Value | None]) -> Iterator[tuple[str, Value]]:
    """Yields the path and the value of each outermost module in a model for which `found` returns a value."""
    outer: list[str] = []
    for path, part in model.named_modules():
        if not any(path.startswith(f"{above}.") or not above for above in outer):
            value = found(part)
            if value is not None:
                outer.append(path)
                yield path, value


def containing(paths: Sequence[str]) -> Iterator[str]:
    """Yields the path of every module that contains all of `paths`, from the innermost to the model itself ("")."""
    pieces = [path.split(".") for path in paths]
    for count in range(min(map(len, pieces)) - 1, -1, -1):
        if len({tuple(each[:count]) for each in pieces}) == 1:
            yield ".".join(pieces[0][:count])


def random_images(model: nn.Module, shape: Sequence[int], count: int = 2) -> Float[Tensor, "count *shape"]:
    """Returns normally distributed images, the same in every call, in the parameters' dtype and on their device.

    The images are sampled on the CPU in float64. So they are equal on all devices, and equal up to rounding in all
    dtypes. For a model on the meta device, the images have no values.
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
    """Returns, for every output, the largest difference that counts as rounding.

    The limit for an output is the square root of the machine epsilon, times the largest magnitude in the output's
    column. A column contains all outputs with the same index on one axis, e.g. of the same class, channel or row. If an
    output is in several columns, the smallest limit counts. Because every column has its own limit, a large constant in
    one output cannot hide differences between small logits. Columns with very small numbers get the lower quartile of
    all limits, because their rounding errors may be as large as in other columns. The epsilon is at least float32's,
    because some attention computes its softmax in float32.
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


# Rounding limits are relative to the size of the outputs or, for outputs near zero, relative to this size.
LEAST_SCALE = 1e-3


# Trees ----------------------------------------------------------------------------------------------------------------


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns the tree with `function(tensor, ...)` in place of every tensor. Other values are not changed.

    Args:
        function: A function of a tensor in the tree, and of the tensors at the same place in the other trees.
        tree: A tensor, or tensors in tuples, lists and mappings.
        *others: Other trees with the same structure.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        items = {key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()}
        # The output classes of transformers are dataclasses, which take their fields as keyword arguments.
        return type(tree)(items) if type(tree) is dict else type(tree)(**items)
    if isinstance(tree, tuple | list):
        values = [mapped(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_of(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Returns the floating-point tensors in a tree, keyed by their place in the tree, e.g. `depth` or `heads.0`."""
    if isinstance(tree, Tensor):
        return {name: tree} if tree.is_floating_point() else {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, tuple | list) else ()
    return {
        place: tensor for key, value in items for place, tensor in tensors_of(value, f"{name}.{key}".strip(".")).items()
    }


def joined(trees: Sequence[Any]) -> Any:
    """Returns one tree for all images, in which the tensors of several batches are concatenated."""
    return mapped(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def from_rows(rows: Float[Tensor, "images numbers"], template: Any) -> Any:
    """Returns a tree with the numbers in `rows` (the inverse of `rows_of`). `template` is the tree for one image."""
    sizes = [tensor[0].numel() for tensor in tensors_of(template).values()]
    parts = iter(rows.split(sizes, dim=1))
    return mapped(
        lambda tensor: next(parts).reshape(-1, *tensor.shape[1:]) if tensor.is_floating_point() else tensor, template
    )


def rows_of(tree: Any) -> Float[Tensor, "images numbers"]:
    """Returns all numbers in a tree as a matrix with a row per image. A tensor with two axes is returned unchanged."""
    if isinstance(tree, Tensor) and tree.ndim == 2:
        return tree
    # flatten(1) would fail for a tensor with a single number per image, [images].
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors_of(tree).values()], dim=1)
