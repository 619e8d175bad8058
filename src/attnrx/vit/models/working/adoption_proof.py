"""Checks that a working copy has the same outputs as its model and contains everything that affects them.

Hooks and methods that a user added to the model must not change its outputs. The library must be able to create the
same submodules again, except for submodules that the user replaced.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map

from attnrx.support.arguments import described_error
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported
from attnrx.support.modules import evaluating, random_images, rounding_limits, tensors_of
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models.observation_hooks import recording_calls
from attnrx.vit.models.working.adopted import Adopted

# Functions from these packages are not a user's changes.
PLAIN_PACKAGES = ("attnrx", "attnrx_lab", "torch", "timm", "transformers", "torchvision", "open_clip")
# Classes of hooks that compute a weight from other tensors before every call.
COMPUTING = (prune.BasePruningMethod, WeightNorm, SpectralNorm)


def require_plain_code(model: nn.Module) -> None:
    """Raises NotSupported if a copied or saved model would lack some of the model's code, or share it with the model.

    The function rejects PEFT adapters, weights that are computed from other tensors, compiled submodules, and a
    `forward` that was replaced by a function. Submodules that were compiled in place (`nn.Module.compile`) are allowed.
    A replaced `forward` is also allowed if it is a bound method or partial function, because it is copied with the
    model.
    """
    for path, part in model.named_modules():
        name, hooks = path or "the model itself", part._forward_pre_hooks.values()
        problem = None
        # Classes are compared by name, because importing PEFT or torch._dynamo takes seconds.
        if any(base.__module__.startswith("peft.") for base in type(part).__mro__):
            problem = (
                f"{name} has adapters of PEFT: give the model with the adapters in its weights, "
                "model.merge_and_unload()."
            )
        elif type(part).__module__.startswith("torch._dynamo"):
            problem = (
                f"{name} was compiled by torch.compile: load the model before it is compiled, and compile the result."
            )
        elif not isinstance(vars(part).get("forward"), MethodType | partial | None):
            problem = (
                f"the forward of {name} was replaced by a function, which a copy would share: remove it (del "
                "part.forward), or make the change in the class of the part."
            )
        elif parametrize.is_parametrized(part) or any(isinstance(hook, COMPUTING) for hook in hooks):
            problem = (
                f"a weight of {name} is computed from other tensors (a mask of pruning, a weight norm, or another "
                "parametrization): make it permanent, e.g. by torch.nn.utils.prune.remove(part, 'weight') or "
                "torch.nn.utils.parametrize.remove_parametrizations(part, 'weight')."
            )
        if problem is not None:
            raise NotSupported(problem)


def require_unchanged(model: nn.Module, run: Callable[[Tensor], Any], input_shape: tuple[int, int, int]) -> None:
    """Raises NotSupported if users' hooks or replaced `forward` methods change the outputs of a model.

    `run` calls the model with random images of the shape `input_shape`. Hooks that only observe are allowed. Hooks that
    change the outputs are rejected, because they would be lost when submodules are replaced or the model is saved.
    """
    added, parameter = list(_added_code(model)), next(model.parameters(), None)
    if not added or parameter is None or parameter.is_meta:
        return
    images = random_images(model, input_shape)
    with evaluating([model]):
        actual = tensors_of(run(images))
        before = [(owner, dict(owner)) for _, owner, _ in added]
        try:
            for _, owner, key in added:
                del owner[key]
            expected = tensors_of(run(images))
        finally:
            for owner, items in before:
                owner.clear()
                owner.update(items)  # keeps the order in which hooks run
    if difference_of(expected, actual):  # up to rounding, because hooks switch fused kernels off
        parts = list(dict.fromkeys(path or "the model itself" for path, _, _ in added))
        raise NotSupported(
            f"a hook or a replaced forward of {', '.join(parts[:4])} changes the outputs of {type(model).__name__}. It "
            "would be lost where parts are replaced, and when the model is saved: remove it (handle.remove(), or del "
            "part.forward), or make the change in the class of the part before attnrx.load."
        )


def _added_code(model: nn.Module) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yields (module path, dictionary, key) for every hook and replaced `forward` that a user added to the model."""
    for path, part in model.named_modules():
        if "forward" in vars(part):
            yield path, vars(part), "forward"
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key, hook in hooks.items():
                function: Any = hook
                while isinstance(function, partial):
                    function = function.func
                # The name of the module that defines the function, or the class of the callable object.
                module = getattr(function, "__module__", None) or type(function).__module__
                if module.split(".")[0] not in PLAIN_PACKAGES:
                    yield path, hooks, key


def difference_of(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> str:
    """Returns a description of the first tensor that differs by more than rounding error, or "" if none differs.

    Each column of the outputs has its own limit for rounding errors (`support.modules.rounding_limits`).
    """
    if expected.keys() != actual.keys():
        return f"they return {list(expected)} and {list(actual)}"
    for name, tensor in expected.items():
        other, where = actual[name], f"output {name}" if name else "the output"
        if tensor.shape != other.shape:
            return f"{where} has the shapes {tuple(tensor.shape)} and {tuple(other.shape)}"
        if (problem := not_finite(tensor)) or (problem := not_finite(other)):
            return f"{where} has {problem}"
        excess, limits = (tensor - other).abs().double(), rounding_limits(tensor)
        is_other = excess > limits
        if bool(is_other.any()):
            index = int((excess - limits).flatten().argmax())
            places = [int(place) for place in torch.unravel_index(torch.tensor(index), tensor.shape)]
            return (
                f"{where} differs at {places} by {float(excess.flatten()[index]):.3g}; rounding explains at most "
                f"{float(limits.flatten()[index]):.3g} there"
            )
    return ""


def not_finite(outputs: Float[Tensor, "batch *sizes"]) -> str:
    """Describes which outputs are NaN or infinite. Returns "" if all outputs are finite."""
    for name, is_so in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("inf", torch.isposinf)):
        found = is_so(outputs)
        if bool(found.any()):
            rows = found.reshape(len(found), -1).any(0).nonzero()[:, 0]
            more = f" and {len(rows) - 4} more places" if len(rows) > 4 else ""
            advice = "compute the outputs without a mask, and mask them after the model"
            advice = "give a model that returns numbers" if name == "NaN" else advice
            return f"{name} at {rows[:4].tolist()}{more} of every image, which cannot be compared: {advice}"
    return ""


def difference_in_structure(model: nn.Module, rebuilt: nn.Module) -> str:
    """Describes the first submodule that differs between a model and its rebuilt copy. Returns "" if none differs."""
    path = next(_differing(model, rebuilt), None)
    if path is None:
        return ""
    found, expected = (_own(each.get_submodule(path)) for each in (model, rebuilt))
    name = next((key for key in {**found, **expected} if found.get(key) != expected.get(key)), "")
    own, other = (side.get(name, "nothing") for side in (found, expected))
    where = f"{path}.{name}".strip(".").removeprefix("source.")
    return f"Its {where or 'class'} is {own}, and that of the rebuilt one {other}."


Run = tuple[nn.Module, Callable[[], object]]


def differing_block(runs: tuple[Run, Run], layers: Sequence[Sequence[nn.Module]], because: str) -> tuple[str, str]:
    """Returns why the outputs of two models differ, and a sentence about the first block with different outputs.

    Args:
        runs: The two models, each with a function that runs the model. Both functions use the same images.
        layers: For each of the two models, a list of the modules to compare, or () if they are unknown. For every
            layer, the list contains first the attention module and then the block.
        because: The explanation to return if the outputs of the attention differ, or if no block can be compared.
    """
    outputs: list[list[Tensor]] = []
    for (model, run), parts in zip(runs, layers, strict=False):
        # Recording turns off the last layer's class-token shortcut, so both models compute all tokens.
        with evaluating((model,)), recording_calls(parts, lambda call: (call.module, call.output_tokens)) as calls:
            run()
        if len(calls) != len(parts):
            return because, ""  # e.g. a module that calls its blocks several times
        outputs.append([dict(calls)[part] for part in parts])
    pairs = list(zip(*outputs, strict=False))
    if not pairs:
        return because, ""
    # A NaN also counts as a difference.
    differs = [bool(difference_of({"": one}, {"": other})) for one, other in pairs]
    index = next((index for index, is_other in enumerate(differs) if is_other and index % 2), None)
    if index is None:
        because = "the parts after the blocks differ, or the head uses other tokens"
        return because, f" The outputs of all {len(outputs[0]) // 2} blocks are equal."
    one, other = pairs[index]
    if not differs[index - 1]:
        because = "the MLP or a norm of a block computes something else, while its attention is equal"
    return because, (
        f" The first block that differs is block {index // 2 + 1} of {len(outputs[0]) // 2}, by "
        f"{float((one - other).abs().max()):.3g}, and its largest output is {float(one.abs().max()):.3g}."
    )


def first_not_finite(run: Run, layers: Sequence[nn.Module]) -> str:
    """Returns a sentence that names the first block with NaN or infinite outputs.

    `layers` contains, for every layer, first the attention module and then the block.
    """
    model, answer = run
    with evaluating((model,)), recording_calls(layers, lambda call: (call.module, call.output_tokens)) as calls:
        answer()
    found, blocks = dict(calls), layers[1::2]
    index = next((index for index, block in enumerate(blocks) if block in found and not_finite(found[block])), None)
    if index is None:
        return " The outputs of all its blocks are finite." if blocks else ""
    attention = layers[2 * index]
    where = ", in its attention" if attention in found and not_finite(found[attention]) else ""
    return f" It is first in block {index + 1} of {len(blocks)}{where}."


def require_equal_outputs(models: tuple[Adopted, Adopted], layers: Sequence[Sequence[nn.Module]], because: str) -> None:
    """Raises NotSupported if two models' outputs for the same random images differ by more than rounding error.

    The message names the first block with different outputs. `layers` and `because` are used as in `differing_block`.
    """
    first, second = models
    images = random_images(first, first.input_shape)
    with evaluating(models):
        expected = outputs_of(first, images, "it cannot be run on images of its input shape")
        actual = outputs_of(second, images, because)
    if difference := difference_of(expected, actual):
        runs = ((first, partial(first, images)), (second, partial(second, images)))
        because, where = differing_block(runs, layers, because)
        raise NotSupported(f"{first.name} cannot be adopted: {because}. On random images {difference}.{where}")


def require_equal_attention(
    adopted: nn.Module, run: Callable[[], object], originals: Sequence[nn.Module], adapters: Sequence[nn.Module]
) -> None:
    """Raises NotSupported unless every adapter returns the same outputs as the attention module that it replaces.

    Both modules get the inputs that the adapter receives in a forward pass of the model. An original module that
    changes its own state in a call is rejected, too. Comparing only the model's outputs is not enough, because a large
    constant or a sigmoid after the attention could hide a difference.
    """
    with evaluating((adopted,)), recording_calls(adapters, lambda call: call) as calls:
        run()
    by_adapter = dict(zip(adapters, enumerate(originals), strict=True))
    for call in calls:
        index, original = by_adapter[call.module]
        before = _state(original)
        precision, actual = next(original.parameters()).dtype, call.output_tokens
        given = (call.tokens, call.args, call.kwargs)
        if actual.dtype != precision:  # the model uses autocast, whose rounding would hide differences, so turn it off
            given = _in_precision(given, precision)
        with evaluating((original, adopted)):
            expected = original(given[0], *given[1], **given[2])
            if actual.dtype != precision:
                actual = call.module(given[0], *given[1], **given[2])
        expected, actual = (each[0] if isinstance(each, tuple) else each for each in (expected, actual))
        where = f"the attention of block {index + 1} of {len(originals)} ({type(original).__name__})"
        changed = [name for name, value in _state(original).items() if not _is_same(before.get(name), value)]
        if changed:
            raise NotSupported(
                f"{where} changes its own {', '.join(changed[:4])} when it is called, which attention in its place "
                "would not do: make it a function of its inputs."
            )
        difference = difference_of({"": expected}, {"": actual})
        if difference:
            raise NotSupported(
                f"{where} cannot be adopted: it computes something else than plain softmax attention, or its heads, "
                f"its scale or the order of its projections are not as they were read. On random images {difference}."
            )


def _in_precision(given: Any, precision: torch.dtype) -> Any:
    """Converts all floating-point tensors among the arguments to this precision."""

    def converted(each: Any) -> Any:
        return each.to(precision) if isinstance(each, Tensor) and each.is_floating_point() else each

    return tree_map(converted, given)


def _state(module: nn.Module) -> dict[str, Any]:
    """Returns the buffers and the public number or tensor attributes of a module and its submodules."""
    state: dict[str, Any] = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, int | float | Tensor) and not name.startswith("_"):
                state[f"{path}.{name}".strip(".")] = value.clone() if isinstance(value, Tensor) else value
    return state


def _is_same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return before.shape == after.shape and bool(torch.equal(before, after))
    return type(before) is type(after) and before == after


def outputs_of(model: Adopted, images: Tensor, because: str) -> dict[str, Tensor]:
    """Returns a working copy's outputs for images [batch, channels, height, width].

    A failing forward pass raises NotSupported with the reason `because`.
    """
    try:
        return tensors_of(model._forward_chunk(images))
    except AttnrxError:
        raise
    except Exception as error:  # the code of a model raises errors of any type
        names, part, trace = {id(part): name for name, part in model.source.named_modules()}, "", error.__traceback__
        while trace is not None:  # the innermost part of the model that was called
            part, trace = names.get(id(trace.tb_frame.f_locals.get("self"))) or part, trace.tb_next
        raise NotSupported(
            f"{model.name} cannot be adopted: {because}. On random images of shape "
            f"{tuple(images.shape)} {part or 'the model itself'} raises {type(error).__name__}: {error}"
        ) from error


# Layers that attnrx can describe in a file, because each argument is an attribute of the same name. Softmax and Sigmoid
# are excluded, because outputs are compared as logits, and these layers return probabilities.
LAYERS = {
    layer.__name__: layer
    for layer in (
        nn.Identity, nn.Linear, nn.Flatten, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d,
        nn.GELU, nn.ReLU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Hardswish, nn.Mish,
    )
}  # fmt: skip


def describe_part(module: nn.Module) -> dict[str, Any] | None:
    """Describes a layer in LAYERS, or an nn.Sequential of such layers, by its class and arguments.

    Returns None for all other modules.
    """
    if type(module) is nn.Sequential:
        parts = {name: describe_part(part) for name, part in module.named_children()}
        return None if None in parts.values() else {"layer": "Sequential", "parts": parts}
    layer = LAYERS.get(type(module).__name__)
    if type(module) is not layer:  # excludes classes of the same name from elsewhere
        return None
    arguments = {}
    for name in inspect.signature(layer.__init__).parameters:
        if name in ("self", "args", "kwargs", "device", "dtype"):
            continue
        value = getattr(module, name, None)
        # The argument `bias` says whether there is a bias.
        arguments[name] = value is not None if name == "bias" else list(value) if isinstance(value, tuple) else value
    described = {"layer": type(module).__name__, "arguments": arguments}
    # A layer option without an attribute would be lost, so such layers return None.
    return described if repr(build_part(described)) == repr(module) else None


def build_part(described: Mapping[str, Any]) -> nn.Module:
    """Creates a module from a description, which may come from a file.

    Raises:
        InvalidInput: The description does not have the form that `describe_part` returns.
    """
    try:
        if described["layer"] == "Sequential":
            return nn.Sequential(OrderedDict((name, build_part(part)) for name, part in described["parts"].items()))
        return LAYERS[described["layer"]](**described["arguments"])
    except Exception as error:  # torch raises errors of many types for wrong arguments
        raise InvalidInput(
            f"{described!s:.200} describes no layer of {', '.join(LAYERS)} or Sequential: {described_error(error)}."
        ) from error


def differing_parts(model: nn.Module, rebuilt: nn.Module) -> dict[str, dict[str, Any] | None]:
    """Returns a description of every submodule that differs between a model and its rebuilt copy, by path.

    The path "" stands for the model itself. Submodules that `describe_part` cannot describe have the value None.
    """
    return {path: describe_part(model.get_submodule(path)) for path in _differing(model, rebuilt)}


def replaced_parts(model: nn.Module, rebuilt: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns `differing_parts`, or {} if the model itself differs or a differing submodule cannot be described."""
    parts = {path: part for path, part in differing_parts(model, rebuilt).items() if path}
    return {} if None in parts.values() else {path: part for path, part in parts.items() if part is not None}


def _differing(model: nn.Module, rebuilt: nn.Module, path: str = "") -> Iterator[str]:
    """Yields the paths of the submodules that differ between two models, without the submodules inside them."""
    if type(model) is not type(rebuilt) or _own(model) != _own(rebuilt):
        yield path
        return
    for name, child in model.named_children():
        yield from _differing(child, rebuilt.get_submodule(name), f"{path}.{name}".lstrip("."))


def _own(module: nn.Module) -> dict[str, str]:
    """Returns a module's class and settings (under ""), the shapes of its saved tensors, and its children's names."""
    tensors: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    saved = {name: each for name, each in tensors.items() if name not in module._non_persistent_buffers_set}
    is_leaf = not module._modules  # a leaf may have its own text
    return {
        # The text of a module shows settings that its weights do not show: activations, epsilons and dropout rates.
        "": str(module) if is_leaf else f"{type(module).__name__}({module.extra_repr()})",
        **{name: f"of shape {tuple(each.shape)}" for name, each in saved.items() if each is not None},
        **{name: "a part" for name, _ in module.named_children()},
    }
