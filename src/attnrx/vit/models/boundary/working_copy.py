"""Converts models to the working copies that attnrx uses internally, and back to the user's own classes.

A loaded model keeps the class of its library or user, and stores a record with what attnrx knows about it. attnrx's
public functions on models (verbs) compute with a working copy of the model (`Adopted`). In a working copy, the
attention modules are attnrx's own, linear maps and blocks may use attnrx's kernels, and a library's model returns one
tensor.

The result of a verb is then written into a copy of the user's module. If a library's attention module or linear map
cannot store the new weights, attnrx replaces this module.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from attnrx.support.arguments import checked, user_code
from attnrx.support.earlier_versions import fingerprinted_names
from attnrx.support.errors import NotSupported
from attnrx.support.modules import copy_module, evaluating, random_images, share_again_, shared_weights, tensors_of
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.support.storage import fingerprint
from attnrx.vit.attention import Attention
from attnrx.vit.attention.attention import BACKENDS
from attnrx.vit.models.families import FAMILIES, family_of, known_family, require_ordinary_weights
from attnrx.vit.models.family import called_with_images, state_outputs_, stated_outputs
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.parts.mlp import Halves, LowRankLinear, write_linear_
from attnrx.vit.models.parts.module_inputs import PatchInputs
from attnrx.vit.models.parts.record import KEPT_HEADS, RECORD, Record, record_of
from attnrx.vit.models.parts.token_reduction import TokenRun, reduction_of
from attnrx.vit.models.users.reader import StructureFamily
from attnrx.vit.models.users.units import Convolution
from attnrx.vit.models.working.adopted import (
    Adapter,
    Adopted,
    OwnModel,
    PairBias,
    aliased,
    is_capturing,
    remove_capturing_,
)
from attnrx.vit.models.working.adoption_proof import difference_of
from attnrx.vit.models.working.token_hooks import attach_tokens_, detach_tokens_, recording_tokens

WORKING = "attnrx_working"
"""The attribute in which an accelerated model stores its working copy."""
HOOKS = "hooks"
"""The working copy's attribute for the keys of the hooks that the model had before it was accelerated."""
SIZES = ("in_features", "out_features", "num_features", "in_channels", "out_channels", "groups", "normalized_shape")
"""Attributes in which a part states the sizes of its weights."""


def is_working(model: nn.Module) -> bool:
    """Returns whether a model is a working copy."""
    return isinstance(model, Adopted)


def working_copy(model: nn.Module) -> nn.Module:
    """Returns a working copy of a model that has attnrx's record. Other models are returned unchanged.

    Except for attention weights, the copy shares its parameters' memory with the model. Do not change the parameters
    of the copy in place.
    """
    if WORKING in vars(model):
        model = plain_form(model)
    record = record_of(model)
    if record is None or isinstance(model, Adopted):
        return model
    family: Any = next(family for family in FAMILIES.loaded if family.reads(record))
    reduction = reduction_of(model)
    working = family.working(model if reduction is None else detach_tokens_(aliased(model)), record)
    if record.outputs is not None:
        state_outputs_(working, record.outputs)
    _attach_tokens_of_(working, model)
    working.own = OwnModel(model)
    return working


@checked()
def model_fingerprint(model: nn.Module) -> str:
    """Returns a hash of a model's weights, computed from the model's working copy."""
    model = working_copy(model)
    require_ordinary_weights(model)
    is_inside = isinstance(model, Adopted) and model.around is not None
    return fingerprint(fingerprinted_names(model.state_dict()) if is_inside else model.state_dict())


def answer(model: nn.Module, images: ImageBatch) -> Any:
    """Runs a model on images. Returns one row per image, or the whole output if a user's module contains the model.

    In transformers, models name the image argument differently, and return several tensors. With this function, you can
    call all models in the same way.
    """
    return _caller(model)(model, images)


def _caller(model: nn.Module) -> Callable[[nn.Module, ImageBatch], Any]:
    family = known_family(model)
    return called_with_images if family is None else family.caller(model)


def require_alike(model: nn.Module, other: nn.Module, remedy: str) -> None:
    """Raises NotSupported if a model and another form of it return different outputs for random images.

    The error message contains `remedy`. The function runs copies of the models, because transformers leaves hooks in
    models that it runs. Models that prune tokens are not compared, because rounding errors may change which tokens they
    prune.
    """
    if next(model.parameters()).is_meta or WORKING in vars(model) or reduction_of(model) is not None:
        return
    model, other = (each if is_working(each) else aliased(each) for each in (model, other))
    family, name = family_of(model), type(model).__name__
    shape, inputs = family.input_shape(model), family.inputs(model)
    if isinstance(inputs, PatchInputs) and inputs.is_padded(shape):
        return  # random numbers are not a valid padding mask
    images = random_images(other, shape)
    with evaluating((model, other)), user_code(f"{name}, called with random images,"):
        expected = tensors_of(answer(model, images))
        difference = difference_of(expected, tensors_of(answer(other, images)))
        if difference and not difference_of(expected, tensors_of(answer(model, images))):
            raise NotSupported(f"{name} {remedy} On random images {difference}.")


def own_model(model: nn.Module) -> nn.Module:
    """Returns the user's model from which a working copy was made, wrapped in `Answering`.

    If the working copy's weights have changed since then, the working copy itself is returned. A model that is not a
    working copy is returned unchanged.
    """
    kept = model.own if isinstance(model, Adopted) else None
    own = None if kept is None else kept.model
    if own is None:
        return model
    weights = dict(own.named_parameters())
    again = dict(library_form(model).named_parameters())
    return Answering(own) if weights.keys() == again.keys() and _have_equal(weights, again) else model


def timed_form(model: nn.Module, in_kernels: bool) -> nn.Module:
    """Returns the model to time, which runs in attnrx's kernels if `in_kernels` is true, or else in the user's code."""
    return model if in_kernels or not is_working(model) else Answering(library_form(model))


class Answering(nn.Module):
    """Wraps a model for exporters. `forward` takes only images and returns the output of `answer`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.caller = model, _caller(model)

    def forward(self, images: ImageBatch) -> Any:
        return self.caller(self.model, images)


def token_run(model: nn.Module, images: ImageBatch, tracked: bool = False) -> TokenRun:
    """Runs a model on images in evaluation mode, and returns which tokens were pruned or merged.

    If `tracked` is true, the `TokenRun` also contains the token that represents each patch after every pruning stage
    (`TokenRun.representatives`).
    """
    with evaluating((model,)), recording_tokens(model, tracked) as runs:
        answer(model, images)
    return runs[-1] if runs else TokenRun()


class _NeedsBlocks(Exception):
    """Raised if the user's blocks cannot call attnrx attention, so the result must contain rewritten blocks."""


def library_form(model: nn.Module) -> nn.Module:
    """Converts a working copy to a module of the user's class. The two models share the memory of their weights."""
    if not isinstance(model, Adopted):
        return model
    try:
        # Tokens are removed between blocks, so blocks must be called one by one. The user's code may not do so.
        return _library_form(model, in_blocks=reduction_of(model) is not None)
    except _NeedsBlocks:
        return _library_form(model, in_blocks=True)


def plain_form(accelerated: nn.Module) -> nn.Module:
    """Converts a model accelerated by attnrx's kernels back to its plain form. The two models share memory.

    Hooks and attributes that the user added to the accelerated model are copied to the plain form.

    Raises:
        NotSupported: The user put a hook on a kernel module that the plain model does not contain.
    """
    working = vars(accelerated)[WORKING]
    result = library_form(working)
    _put_attributes_(accelerated, result)
    _put_hooks_(accelerated, result, vars(working)[HOOKS])
    remove_capturing_(result)
    return result


def hook_keys(model: nn.Module) -> dict[str, frozenset[int]]:
    """Returns the keys of all forward hooks, by the path of the part that has them."""
    keys = {path: frozenset((*part._forward_pre_hooks, *part._forward_hooks)) for path, part in model.named_modules()}
    return {path: each for path, each in keys.items() if each}


def _put_hooks_(accelerated: nn.Module, result: nn.Module, before: Mapping[str, frozenset[int]]) -> None:
    """Copies new hooks (not in `before`) from an accelerated model to the plain model, and removes deleted hooks."""
    named = dict(result.named_modules())
    for path, part in accelerated.named_modules():
        own, known = named.get(path), before.get(path, frozenset())
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            present = getattr(part, hooks)
            added = {key: hook for key, hook in present.items() if key not in known and not is_capturing(hook)}
            if added and own is None:
                raise NotSupported(
                    f"a hook was put on {path}, a part of attnrx's kernels that the model itself does not have: remove "
                    "it (handle.remove()), or take attnrx.plain(model) before it, and put it on a part of that."
                )
            if own is None:
                continue
            for key in known & getattr(own, hooks).keys() - present.keys():
                del getattr(own, hooks)[key]
            for key, hook in added.items():
                options = {"with_kwargs": key in getattr(part, f"{hooks}_with_kwargs")}
                if hooks == "_forward_hooks":
                    own.register_forward_hook(hook, always_call=key in part._forward_hooks_always_called, **options)
                else:
                    own.register_forward_pre_hook(hook, **options)


def _put_attributes_(accelerated: nn.Module, result: nn.Module) -> None:
    """Copies numbers, strings and settings from the parts of an accelerated model to its plain form."""
    named, skipped = dict(result.named_modules()), {*vars(nn.Module()), RECORD, WORKING}
    for path, part in accelerated.named_modules():
        own = named.get(path)
        if own is None or not isinstance(part, type(own)) or type(own).__module__.startswith("attnrx"):
            continue
        for name, value in vars(part).items():
            if name in skipped:
                continue
            if (not path and name not in vars(own)) or isinstance(value, int | float | str | None):
                vars(own)[name] = value
            else:
                _put_settings_(vars(own).get(name), value)


def _put_settings_(own: Any, value: Any) -> None:
    """Copies settings (a dictionary, or an object such as a configuration) into existing settings, in place.

    The existing object is updated and not replaced, because several parts of a model may share it.
    """
    is_other = callable(value) or isinstance(value, nn.Module | Tensor) or type(value).__module__.startswith("attnrx")
    if type(own) is not type(value) or is_other or value is own:
        return
    if isinstance(value, dict):
        own.clear()
        own.update(copy.deepcopy(value))
    elif hasattr(value, "__dict__"):
        for name, each in vars(value).items():
            if hasattr(each, "__dict__") and type(vars(own).get(name)) is type(each):
                _put_settings_(vars(own)[name], each)
            else:
                vars(own)[name] = copy.deepcopy(each)


def _library_form(model: Adopted, in_blocks: bool) -> nn.Module:
    """Implements `library_form`. If `in_blocks` is true, blocks are rewritten to take tokens [batch, tokens, width]."""
    family: Any = family_of(model)
    assert model.plain is not None
    result, facts, places = model.plain.copied(), family.present_facts(model), dict(model.places)
    if in_blocks:
        result, facts = family.in_blocks(result, model.path, facts)
        places = {}
    shared = shared_weights(result).values()
    handled = set(_put_attention_(family, model, result, places))
    handled |= set(_put_maps_(model, result, places))
    _put_others_(model.source, result, handled, places)
    share_again_(result, shared)
    _put_modes_(model.source, result, places)
    vars(result)[RECORD] = Record(family.name, model.origin, model.around, facts, stated_outputs(model))
    _attach_tokens_of_(result, model)
    return result


def _attach_tokens_of_(model: nn.Module, other: nn.Module) -> None:
    """Attaches the token policy of `other` (another form of the same model) and its predictors to `model`, if any."""
    reduction = reduction_of(other)
    if reduction is None:
        return
    attached = attach_tokens_(model, family_of(model), reduction.policy, reduction.by, reduction.shape.heads)
    attached._modules["stages"] = aliased(reduction.stages)
    attached.train(reduction.training)


def _joined(*paths: str) -> str:
    return ".".join(path for path in paths if path)


def _put_attention_(family: AdoptedFamily, model: Adopted, result: nn.Module, places: dict[str, str]) -> Iterator[str]:
    """Writes every layer's attention into the result's attention module, or replaces a module that cannot store it.

    Yields the path of every attention module in the working copy. If a norm moves together with its attention module,
    the new path of the norm is stored in `places`.
    """
    if not family.reads_attention(model):
        return
    trunk, path = model.trunk, model.path
    parts = family.parts(trunk)
    for block in family.block_paths(trunk):
        inside = _joined(path, block, parts.attention)
        yield inside
        adapter: Adapter = trunk.get_submodule(f"{block}.{parts.attention}")  # type: ignore[assignment]
        target = places.get(inside, inside)
        module = result.get_submodule(target)
        if isinstance(module, nn.Sequential) and isinstance(module[-1], Adapter):
            target, module = f"{target}.{len(module) - 1}", module[-1]
        source = trunk if isinstance(family, StructureFamily) else result.get_submodule(path)
        if isinstance(module, Adapter):
            result.set_submodule(target, _released(adapter, module))
        elif not _is_written_(family, source, module, adapter):
            # The attention module may have its own norm, which lies outside of the blocks that attnrx calls.
            norm = places.get(_joined(path, block, "norm"), "") if places else ""
            replaced: nn.Module = _released(adapter, module)
            if norm.startswith(f"{target}."):
                replaced = nn.Sequential(result.get_submodule(norm), replaced).train(module.training)
                places[_joined(path, block, "norm")] = f"{target}.0"
            elif isinstance(module, nn.MultiheadAttention) and not module.batch_first:
                raise _NeedsBlocks  # the library's module takes [tokens, batch, width]
            result.set_submodule(target, replaced)


def _is_written_(family: AdoptedFamily, source: nn.Module, module: nn.Module, adapter: Adapter) -> bool:
    """Writes attention into a library's module. Returns whether the same attention can be read back from the module.

    If not, the module's earlier contents are restored.
    """
    attention = adapter.attention
    if not _is_idle(attention):
        return False
    before = [(part, dict(vars(part)), dict(part._parameters)) for part in module.modules()]
    try:
        family.write_attention_(source, module, adapter)
        found = family.convert_attention(source, module)
        is_same = found.spec == attention.spec and _are_equal(found, attention)
        # A found structure has attention that takes sequences. Otherwise the input may be a grid of tokens.
        is_grid = family.parts(source).grid_axis is not None and not isinstance(family, StructureFamily)
        sides = (attention.spec.window or (2, 3)) if is_grid else (5,)
        if is_same and (KEPT_HEADS not in vars(module) or _answer_alike(module, adapter, sides)):
            return True
    except Exception:  # the module has other shapes or parts
        pass
    for part, attributes, parameters in before:
        vars(part).clear()
        vars(part).update(attributes, _parameters=parameters)
    return False


def _answer_alike(module: nn.Module, adapter: Adapter, sides: tuple[int, ...]) -> bool:
    """Returns whether a pruned attention module and attnrx's adapter return the same output for random tokens."""
    weight = adapter.attention.output.weight
    if weight.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, *sides, adapter.attention.spec.width, generator=generator, dtype=torch.float64).to(weight)
    with evaluating((module, adapter)):
        outputs = [part(tokens) for part in (module, adapter)]
    one, other = ({"": each[0] if isinstance(each, tuple) else each} for each in outputs)
    return not difference_of(one, other)


def _is_idle(attention: Attention) -> bool:
    """Returns whether an attention module has neither a backend that captures values nor a hook."""
    return type(attention.backend) in BACKENDS.loaded and not attention._forward_hooks


def _are_equal(first: nn.Module, second: nn.Module) -> bool:
    return _have_equal(dict(first.named_parameters()), dict(second.named_parameters()))


def _have_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if one.keys() != other.keys():
        return False
    for name, tensor in one.items():
        like = other[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.device != like.device:
            return False
        if not tensor.is_meta and not torch.equal(tensor, like):
            return False
    return True


def _released(adapter: Adapter, module: nn.Module) -> Adapter:
    """Returns a copy of an adapter to replace `module`, without state that token policies or observers added."""
    released: Any = detach_tokens_(aliased(adapter))
    if "config" in vars(module):  # the result's own configuration, which users of transformers may change
        released.config = vars(module)["config"]
    attention = released.attention
    if not _is_idle(attention):
        attention.backend = BACKENDS["auto"]()
        attention._forward_hooks.clear()
    return released


def _put_maps_(model: Adopted, result: nn.Module, places: Mapping[str, str]) -> Iterator[str]:
    """Writes the linear maps of every MLP into the result, and yields their paths in the working copy."""
    trunk, path = model.trunk, model.path
    for pair, plain in zip(model.pairs, vars(model).get("plain_pairs", model.pairs), strict=True):
        sides = zip((pair.first, pair.second, *pair.between), (plain.first, plain.second, *plain.between), strict=True)
        for working, library in sides:
            inside = _joined(path, working)
            part = trunk.get_submodule(working)
            whole, _, half = library.rpartition(".")
            named = _joined(path, whole)
            named = places.get(named, named)
            if half in ("first", "second") and isinstance(result.get_submodule(named), nn.Linear):
                if half == "first":
                    _put_halves_(trunk.get_submodule(working.rpartition(".")[0]), result, named)
                yield inside
                continue
            if half in ("first", "second") and isinstance(result.get_submodule(named), Halves):
                library = working
            target = _joined(path, library)
            _put_map_(part, result, places.get(target, target))
            yield inside


def _put_halves_(halves: Any, result: nn.Module, target: str) -> None:
    sides = halves.first, halves.second
    if all(isinstance(side, nn.Linear) for side in sides):
        bias = None if sides[0].bias is None else torch.cat([side.bias for side in sides])
        write_linear_(result.get_submodule(target), torch.cat([side.weight for side in sides]), bias)
    else:
        result.set_submodule(target, _plain_maps(aliased(halves)))


def _put_map_(part: nn.Module, result: nn.Module, target: str) -> None:
    """Writes a linear map's weights into the library's linear map, or replaces that map if the new one is factored."""
    own = result.get_submodule(target)
    if isinstance(part, Convolution):
        if isinstance(own, nn.Conv2d) and isinstance(part.linear, nn.Linear):
            weight = part.linear.weight
            inputs = weight.shape[1] // (part.kernel[0] * part.kernel[1])
            _set_tensors_(own, {"weight": weight.unflatten(1, (inputs, *part.kernel)), "bias": part.linear.bias})
            own.in_channels, own.out_channels = inputs, len(weight)
            return
    elif isinstance(part, nn.Linear) and isinstance(own, nn.Linear):
        write_linear_(own, part.weight, part.bias)
        return
    elif not isinstance(part, LowRankLinear):
        _put_part_(part, own)
        return
    placed = _plain_maps(aliased(part))
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        getattr(placed, hooks).update(getattr(own, hooks))
    result.set_submodule(target, placed)


def _plain_maps(module: nn.Module) -> nn.Module:
    """Replaces instances of nn.Linear subclasses in a module by plain nn.Linear modules, in place."""
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear) and type(part) is not nn.Linear:
            with torch.device("meta"):
                linear = nn.Linear(part.in_features, part.out_features, part.bias is not None)
            linear._parameters.update(part._parameters)
            module.set_submodule(path, linear.train(part.training))
    return module


def _put_others_(root: nn.Module, result: nn.Module, handled: set[str], places: Mapping[str, str]) -> None:
    """Writes the weights, buffers and sizes of all parts outside of `handled` into the result."""
    named, biases = dict(result.named_modules()), dict[str, str]()
    for path, part in root.named_modules():
        if isinstance(part, PairBias):
            biases[f"{path}.source"] = path
        if any(path == inside or path.startswith(f"{inside}.") for inside in handled):
            continue
        first = next((inside for inside in biases if f"{path}.".startswith(f"{inside}.")), None)
        target = places.get(path, path) if first is None else biases[first] + path.removeprefix(first)
        if target in named and (part._parameters or part._buffers):
            _put_part_(part, named[target])


def _put_modes_(root: nn.Module, result: nn.Module, places: Mapping[str, str]) -> None:
    """Copies training modes into the result. A part that the working copy lacks changes its mode with its parent."""
    working = {places.get(path, path): part.training for path, part in root.named_modules()}
    before = {path: part.training for path, part in result.named_modules()}
    for path, part in result.named_modules():
        owner = path.rpartition(".")[0]
        if path in working:
            part.training = working[path]
        elif before[owner] != result.get_submodule(owner).training:
            part.training = result.get_submodule(owner).training


def _put_part_(part: nn.Module, own: nn.Module) -> None:
    for name in SIZES:
        if name in vars(part) and name in vars(own):
            setattr(own, name, getattr(part, name))
    _set_tensors_(own, {**part._parameters, **part._buffers})


def _set_tensors_(own: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if name in own._buffers:
            own._buffers[name] = tensor
        elif name in own._parameters:
            before = own._parameters[name]
            trained = tensor is not None and (tensor.requires_grad if before is None else before.requires_grad)
            own._parameters[name] = None if tensor is None else nn.Parameter(tensor.detach(), trained)


def accepting(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Returns the model, or a copy of it that takes inputs of this shape (channels, height, width).

    A copy is made only if the model takes another shape. The model's library interpolates the position embeddings. If
    tokens are pruned, each pruning stage keeps the same share of the patches as before. If the number of channels
    cannot be changed, the model itself is returned.

    Raises:
        NotSupported: The library cannot interpolate this model's position embeddings.
        InvalidInput: Patches do not tile images of this size, or a token policy would keep no patch.
    """
    family = family_of(model)
    own = family.input_shape(model)
    if len(shape) != 3 or own == shape:
        return model
    has_record = record_of(model) is not None
    other = working_copy(model) if has_record else copy_module(model)
    if own[0] != shape[0]:
        if not family.accepts_(other, shape):
            return model  # the call then raises an error about the channels
    else:
        family.resize_(other, *shape[1:])
    return library_form(other) if has_record else other


def at_size_of(model: nn.Module, other: nn.Module) -> nn.Module:
    """Returns the model, or a copy of it that takes images of the other model's size.

    The two models need the same number of channels.

    Raises:
        NotSupported: The library cannot interpolate this model's position embeddings.
        InvalidInput: Patches do not tile images of this size.
    """
    # A model without a family is a runtime's file, or any other module.
    family = known_family(other)
    return model if family is None or known_family(model) is None else accepting(model, family.input_shape(other))
