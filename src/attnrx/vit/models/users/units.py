"""Compresses models with unsupported attention by pruning only the hidden units of their MLPs.

Swin, Hiera, SAM, PVT, SegFormer, MaxViT, ConvNeXt and many decoders have MLPs like a Vision Transformer, so attnrx can
prune the hidden units of all these models. It finds the two linear layers of each MLP by the order in which modules are
called. A test on random images then shows whether the hidden units are independent.

A pair consists of the two linear layers of an MLP. Two convolutions are also a pair if the second has a 1 x 1 kernel.
No hidden unit between the two layers may depend on another unit. In a gated MLP (SwiGLU), a unit is the product of two
numbers. They come from two linear layers, or from the two halves of a single linear layer. Of these two layers (or
halves), the one that is called first is the first layer of the pair, and the other one is the gate. `Pair.between`
lists the gate and all other modules with weights per unit.
"""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from attnrx.support.arguments import described_error, user_code
from attnrx.support.errors import NotSupported
from attnrx.support.modules import containing, evaluating, random_images, shared_weights, tensors_of
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.costs import ModelCosts, PartCosts, layer_costs
from attnrx.vit.kernels.native_products import NativeLinear, native_
from attnrx.vit.models.family import LayerShapes, num_outputs
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.observation_hooks import ModuleCall, recording_calls, replacing_forward
from attnrx.vit.models.parts.mlp import CONVOLUTIONS, Pair, halve_, hidden_units, keep_units_of_, sides_of
from attnrx.vit.models.parts.module_costs import macs_by_part, matrix_entries, mlp_costs, num_params
from attnrx.vit.models.parts.module_inputs import called, inputs_of
from attnrx.vit.models.parts.record import Record
from attnrx.vit.models.parts.vit_parts import ViTParts, model_name, require_parts
from attnrx.vit.models.working.adopted import Adopted, Origin
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout

# Image sizes to try for a model that states no size.
SIDES = (224, 256, 384, 512, 1024, 192, 128, 96, 64, 32)
# A pair is ignored if it has less than this share of the largest pair's MACs. Such pairs are, for example, heads of
# pooled features and the small MLPs that compute position biases.
LEAST_SHARE = 0.01


class Convolution(nn.Module):
    """A convolution for inputs [batch, channels, height, width] that stores its weight in a linear layer."""

    def __init__(self, linear: nn.Module, kernel: tuple[int, int], **geometry: Any):
        """Stores the linear layer, the kernel size, and the `geometry` (stride, padding and dilation)."""
        super().__init__()
        self.linear, self.kernel, self.geometry = linear, kernel, geometry

    def forward(self, maps: Float[Tensor, "batch inputs height width"]) -> Float[Tensor, "batch outputs rows columns"]:
        linear: Any = self.linear
        # Hooks and replacements of the linear map expect features on the last axis, as in all other linear maps.
        # Without hooks, F.conv2d is called directly, which saves the copy into this order.
        is_watched = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
        if not is_watched and type(linear) is NativeLinear and linear.weight.numel():
            weight = linear.weight.unflatten(1, (maps.shape[1], *self.kernel))
            return F.conv2d(maps, weight, linear.bias, **self.geometry)
        if self.kernel == (1, 1):
            return linear(maps.movedim(1, -1)).movedim(-1, 1)
        sizes = zip(maps.shape[2:], self.kernel, *self.geometry.values(), strict=True)
        rows, _ = ((size + 2 * pad - step * (wide - 1) - 1) // stride + 1 for size, wide, stride, pad, step in sizes)
        return linear(F.unfold(maps, self.kernel, **self.geometry).mT).mT.unflatten(2, (rows, -1))


# The facts in a module's record: its pairs, the MACs of everything else, and the map that computes the output.
FACTS = ("pairs", "outer_macs", "head")


class UnitsModel(Adopted):
    """A working copy of a module of any class, in which attnrx can prune only the hidden units of MLPs."""

    outer_macs = 0
    head = ""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        vars(self).update({name: self.facts[name] for name in FACTS if name in self.facts})


class UnitsFamily(AdoptedFamily):
    """The model family for modules of any class that contain MLPs with independent hidden units.

    The family treats every module as a user's own module (see `Surroundings`). Each MLP counts as one layer. The
    layer's attention spec has no heads, even if the module computes attention.
    """

    name = "units"
    library = ""
    model_type = UnitsModel

    def adopts(self, model: nn.Module) -> bool:
        return True

    def parts(self, source: nn.Module) -> ViTParts:
        return ViTParts((), "", "", "", mlp_classes=(), pooling="parts that are not read")

    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the input format for the first image size at which the module runs.

        Sizes that the module states are tried before common sizes.

        Raises:
            NotSupported: The module runs at none of the tried sizes.
        """
        failures = []
        for shape in _shapes(model):
            try:
                with evaluating((model,)):
                    called(model, random_images(model, shape, 1))
            except Exception as error:  # the code of a module raises errors of any type
                failures.append(f"{type(error).__name__}: {described_error(error)}")
                continue
            facts = getattr(model, "pretrained_cfg", None) or {}
            half = (0.5,) * shape[0]
            mean, std = (tuple(facts.get(name) or half) for name in ("mean", "std"))
            fits = len(mean) == shape[0]
            return Origin(type(model).__name__, {}, shape, mean if fits else half, std if fits else half)
        raise NotSupported(
            f"{model_name(model)} has no reader, and cannot be called with images of any common size, which is needed "
            f"to find its MLPs: {failures[0] if failures else 'it has no convolution'}."
        )

    def fit_created_(self, source: nn.Module, origin: Origin, before: Origin | None = None) -> None:
        """Changes nothing, because attnrx reads no position embeddings of the module."""

    def resize_trunk_(self, adopted: Adopted, height: int, width: int) -> None:
        shape = (adopted.origin.input_shape[0], height, width)
        with user_code(f"{adopted.origin.architecture} does not take images of {height} x {width}: it", NotSupported):
            self._measure_(adopted, shape)
        adopted.origin = replace(adopted.origin, input_shape=shape)

    def viewed(self, model: nn.Module, record: Record) -> Adopted:
        return self.working(model, record)  # its maps are not the module's own maps

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        """Finds the pairs unless they are known, and converts the layers of all pairs to `NativeLinear`."""
        found = self._own(adopted)
        if not found.pairs:
            pairs, head = separate_pairs(found.trunk, found.origin.input_shape)
            vars(found).update(pairs=pairs, head=head)
            if not found.pairs:
                raise NotSupported(
                    f"{model_name(found.trunk)} has no reader, and no MLP of two linear maps or 1 x 1 convolutions "
                    "with only an activation, a dropout, a gate, a depthwise convolution or a batch norm between them."
                )
        named = dict(found.trunk.named_modules())
        for pair in found.pairs:
            whole = pair.first.rpartition(".")[0]
            if pair.first not in named and isinstance(named.get(whole), nn.Linear):
                halve_(found.trunk, whole)
        paths = [path for pair in found.pairs for path in (pair.first, pair.second, *pair.between)]
        require_parts(found.trunk, paths, found.origin.architecture)
        for pair in found.pairs:
            for path in (pair.first, pair.second, *pair.between):
                part: Any = found.trunk.get_submodule(path)
                if type(part) is nn.Linear:
                    native_(part)
                elif isinstance(part, CONVOLUTIONS) and path not in pair.between:
                    own: Any = part
                    weight = nn.Parameter(own.weight.detach().flatten(1), own.weight.requires_grad)
                    with torch.device("meta"):
                        linear = NativeLinear(weight.shape[1], weight.shape[0], own.bias is not None)
                    linear.weight, linear.bias = weight, own.bias
                    geometry = {"stride": own.stride, "padding": own.padding, "dilation": own.dilation}
                    convolution = Convolution(linear, own.kernel_size, **geometry)
                    found.trunk.set_submodule(path, convolution.train(part.training))
        if not found.pairs[0].positions:
            self._measure_(found, found.origin.input_shape)

    def _measure_(self, adopted: Adopted, shape: tuple[int, int, int]) -> None:
        """Counts, in one forward pass, the positions that each MLP processes and the MACs of all other modules."""
        found, maps = self._own(adopted), self.mlp(adopted)
        macs = macs_by_part(found.trunk, random_images(found.trunk, shape, 1))
        vars(found)["pairs"] = tuple(
            replace(
                pair,
                positions=macs[pair.first] // matrix_entries(first),
                unit_macs=sum(macs.get(path, 0) for path in pair.between) // first.out_features,  # type: ignore[operator]
            )
            for pair, (first, _) in zip(found.pairs, maps, strict=True)
        )
        vars(found)["outer_macs"] = macs[""] - sum(layer.mlp.macs for layer in self.costs(found).layers)

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        with torch.device("cpu"):
            return tuple(map(Attention, self.specs(model)))

    def specs(self, model: nn.Module) -> tuple[AttentionSpec, ...]:
        """Returns placeholder specs without heads and without costs, because this family reads no attention."""
        return tuple(
            AttentionSpec("dense", second.out_features, 1, (), (), 1.0, 1, biases=())  # type: ignore[arg-type]
            for _, second in self.mlp(model)
        )

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Does nothing, because this family reads no attention."""

    def reads_attention(self, model: nn.Module) -> bool:
        return False

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(self._named(model, pair.block) for pair in self._own(model).pairs)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        found = self._own(model)
        pairs = [to_dict(pair) for pair in found.pairs]
        own = {"attention": [], "pairs": pairs, "outer_macs": found.outer_macs, "head": found.head}
        return {**super().describe(model), **own}

    def described_facts(self, created: nn.Module, description: Mapping[str, Any]) -> dict[str, Any]:
        pairs = tuple(from_dict(pair, (Pair,)) for pair in description["pairs"])
        return {"pairs": pairs, "outer_macs": description["outer_macs"], "head": description["head"]}

    def _shape_(self, adopted: Adopted, description: Mapping[str, Any]) -> None:
        self._install_(adopted, ())
        self._shape_mlps_(adopted, description)

    def token_layout(self, model: nn.Module) -> TokenLayout:
        raise NotSupported(
            f"the attention of {self._own(model).origin.architecture} has no reader, so tokens cannot be pruned or "
            "merged, and attention maps are not shown: prescribe hidden=..., e.g. hidden=total_rank:0.5."
        )

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        found = self._own(model)
        head = found.trunk.get_submodule(found.head) if found.head else nn.Identity()
        return (head,) if num_outputs(head) else ()

    def present_facts(self, adopted: Adopted) -> dict[str, Any]:
        found = self._own(adopted)
        return {**found.facts, **{name: getattr(found, name) for name in FACTS}}

    def positions(self, adopted: Adopted) -> int:
        return 1  # every MLP has its own number of positions

    def trunk_costs(self, adopted: Adopted, shapes: LayerShapes) -> ModelCosts:
        """Returns the costs of every MLP. All other modules count as part of the patch embedding."""
        found, maps = self._own(adopted), self.mlp(adopted)
        before = hidden_units(maps)
        layers, inside = [], 0
        for pair, linears, spec, ranks_of, count, now in zip(
            found.pairs, maps, shapes.attention, shapes.mlp_ranks, shapes.hidden, before, strict=True
        ):
            between = sum(num_params(found.trunk.get_submodule(path)) for path in pair.between)
            inside += between + sum(map(num_params, linears))
            mlp = mlp_costs(linears, pair.positions, linears, ranks_of, count)
            mlp += PartCosts(between * count // max(now, 1), pair.unit_macs * count)
            layers.append(layer_costs(spec, pair.positions, mlp, PartCosts()))
        outside = PartCosts(num_params(found.trunk) - inside, found.outer_macs)
        return ModelCosts(outside, tuple(layers), PartCosts(), 0)


def _shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Yields image shapes to try for a module, starting with the sizes in its attributes and configuration."""
    if inputs := inputs_of(model):
        yield inputs.shape
        return
    parts = list(model.modules())
    convolution = next((part for part in parts if isinstance(part, nn.Conv2d)), None)
    facts: Any = getattr(model, "pretrained_cfg", None) or {}
    config = getattr(model, "config", None)
    own = tuple(facts.get("input_size") or ())
    hints = [getattr(part, name, None) for part in parts for name in ("img_size", "image_size")]
    hints += [getattr(config, "image_size", None), own[1:], *_positionsides_of(parts, convolution)]
    if convolution is None and not any(hints):
        return
    # The first convolution may not read the image itself, e.g. after a cosine transform. So stated channels come first.
    first = 3 if convolution is None else convolution.in_channels
    stated_channels = getattr(config, "num_channels", None)
    for hint in dict.fromkeys([*(tuple(hint) if isinstance(hint, list) else hint for hint in hints), *SIDES]):
        sides = (hint, hint) if isinstance(hint, int) else hint
        if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
            for channels in dict.fromkeys((stated_channels or first, *own[:1])):
                yield channels, sides[0], sides[1]


def _positionsides_of(parts: Sequence[nn.Module], convolution: nn.Conv2d | None) -> list[int]:
    """Returns the side lengths of square images that would fit the position embeddings [1, tokens, width]."""
    linear = next((part for part in parts if isinstance(part, nn.Linear)), None)
    if convolution is not None:
        patch = convolution.stride[0]
    else:  # a linear patch embedding, whose inputs are a patch's pixels in three channels
        patch = math.isqrt(linear.in_features // 3) if linear is not None else 0
    counts = {
        tensor.shape[1] - prefix
        for part in parts
        for tensor in part.parameters(recurse=False)
        if tensor.ndim == 3 and len(tensor) == 1
        for prefix in range(6)
    }
    return [patch * math.isqrt(count) for count in sorted(counts) if count > 3 and math.isqrt(count) ** 2 == count]


# The search.


def _is_map(part: nn.Module) -> bool:
    """Returns whether a module is a linear layer, or an ungrouped convolution that pads with zeros."""
    if type(part) in CONVOLUTIONS:
        return part.groups == 1 and part.padding_mode == "zeros" and isinstance(part.padding, tuple)  # type: ignore[union-attr]
    return type(part) in (nn.Linear, NativeLinear)


def _is_second(part: nn.Module) -> bool:
    """Returns whether a layer is linear or a 1 x 1 convolution, so that its weight has one column per input unit."""
    if not isinstance(part, CONVOLUTIONS):
        return True
    return isinstance(part, nn.Conv2d) and part.kernel_size == part.stride == (1, 1) and part.padding == (0, 0)


def units_last(part: nn.Module, features: Float[Tensor, "batch *sizes"]) -> Float[Tensor, "batch *sizes"]:
    """Moves the unit axis of a layer's inputs or outputs to the end."""
    return features.movedim(1, -1) if isinstance(part, CONVOLUTIONS) else features


def _is_per_unit(part: nn.Module, units: int) -> bool:
    """Returns whether a module is a depthwise convolution or a batch norm (not SyncBatchNorm) with `units` channels."""
    if isinstance(part, _BatchNorm):
        return part.num_features == units and type(part).__name__ != "SyncBatchNorm"
    return type(part) is nn.Conv2d and part.groups == part.in_channels == part.out_channels == units


def input_weight(part: Any) -> Float[Tensor, "units *outputs"]:
    """Returns a writable view of a layer's weight with the inputs on the first axis: [units, outputs, *kernel]."""
    return part.weight.detach() if isinstance(part, nn.ConvTranspose2d) else part.weight.detach().movedim(1, 0)


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


class _Trace(NamedTuple):
    """What one forward pass of a model shows about the calls of its modules.

    `order` lists the paths of leaf modules and batch norms in call order. `maps` holds the input shape, the output
    shape and the output of every linear layer or convolution that is called exactly once. `once` contains the paths of
    the modules that are called exactly once, with a tensor. `output` is the model's output.
    """

    order: list[str]
    maps: dict[str, tuple[torch.Size, torch.Size, Tensor]]
    once: set[str]
    output: Any


def _traced(model: nn.Module, images: Tensor) -> _Trace:
    paths = {part: path for path, part in model.named_modules()}

    def keep(call: ModuleCall) -> tuple[nn.Module, int, tuple[torch.Size, torch.Size, Tensor] | None]:
        shapes = (call.tokens.shape, call.output.shape, call.output) if _is_map(call.module) else None
        return call.module, 1 if isinstance(call.tokens, Tensor) else 2, shapes

    with evaluating((model,)), recording_calls(paths, keep) as calls:
        output = called(model, images)
    numbers = Counter[str]()
    for part, number, _ in calls:
        numbers[paths[part]] += number
    once = {path for path, number in numbers.items() if number == 1}
    leaves = [paths[part] for part, _, _ in calls if isinstance(part, _BatchNorm) or not list(part.children())]
    maps = {paths[part]: shapes for part, _, shapes in calls if shapes is not None and paths[part] in once}
    return _Trace(leaves, maps, once, output)


def _candidates(model: nn.Module, trace: _Trace, around: str | None) -> Iterator[Pair]:
    """Yields pairs of layers that may have independent units between them.

    The second layer has as many inputs as the first has outputs. Each weight between the two layers must belong to a
    single unit, as in a batch norm, a depthwise convolution or a gate. If `around` is given, the second layer may be a
    convolution with any kernel, and both layers may be transposed convolutions.
    """
    named, gates, is_around = dict(model.named_modules()), set[str](), around is not None
    order = [path for path in trace.order if not (is_around and path.startswith(f"{around}."))]
    for start, first in enumerate(order):
        is_other = isinstance(named[first], nn.ConvTranspose2d) and not is_around
        if first not in trace.maps or first in gates or is_other:
            continue
        units, between, gate = sides_of(named[first])[1], [], ""
        positions = _positions(named[first], trace.maps[first][1])
        for path in order[start + 1 :]:
            part = named[path]
            if path in trace.maps:
                inputs, outputs, _ = trace.maps[path]
                fits = (is_around or _is_second(part)) and sides_of(part)[0] == units
                fits = fits and positions == _positions(part, inputs)
                block = next((above for above in containing((first, path)) if above in trace.once), None)
                if fits and block is not None:
                    gates.add(gate)
                    yield Pair(first, path, tuple(between), block)
                # A gate maps the same features to the same number of units.
                is_gate = sides_of(part) == sides_of(named[first]) and positions == _positions(part, outputs)
                if gate or is_around or fits or not is_gate or not _is_second(part):
                    break
                gate = path
                between.append(path)
            elif _is_per_unit(part, units):
                between.append(path)
            elif any(True for _ in part.parameters()):
                break


def _positions(part: nn.Module, shape: torch.Size) -> int:
    return shape.numel() // shape[1 if isinstance(part, CONVOLUTIONS) else -1]


def separate_pairs(
    model: nn.Module, shape: tuple[int, int, int], around: str | None = None
) -> tuple[tuple[Pair, ...], str]:
    """Returns the pairs of layers with independent units, and the path of the layer that computes the output (or "").

    Two tests on random images decide whether units are independent. The first test changes half of the entries in the
    output of each pair's first layer. Only the same entries of the second layer's input may change. The second test
    removes half of the units from the first layer and from the modules between the two layers. The second layer must
    receive the kept units unchanged. It then returns its original output, and the model's outputs must stay the same.
    If the path `around` is given, the function returns only pairs outside the module at this path. Their units may be
    channels of any convolution.
    """
    images = random_images(model, shape, 1)
    work, head = _separate(model, images, around)
    if around is None and (
        halved := _halved_(model, images, {path for pair in work for path in (pair.first, pair.second)})
    ):
        work, head = _separate(model, images, around)
        for path in halved.keys() - {pair.first.rpartition(".")[0] for pair in work}:
            model.set_submodule(path, halved[path])
    least = LEAST_SHARE * max(work.values(), default=0)
    return tuple(pair for pair in work if work[pair] >= least), head


def _separate(model: nn.Module, images: Tensor, around: str | None) -> tuple[dict[Pair, int], str]:
    """Returns each pair with the MACs of its two layers, and the path of the layer that computes the output."""
    trace, named, head = _traced(model, images), dict(model.named_modules()), ""
    outputs = tensors_of(trace.output)
    if len(outputs) == 1:
        (tensor,) = outputs.values()
        made = [path for path, (_, _, output) in trace.maps.items() if output.data_ptr() == tensor.data_ptr()]
        head = made[-1] if made and trace.maps[made[-1]][1].numel() == tensor.numel() else ""
    pairs = [pair for pair in _candidates(model, trace, around) if around is not None or pair.second != head]
    # Maps with shared weights are excluded, because changing them would also change the part that shares them.
    shared = shared_weights(model)
    pairs = [
        pair
        for pair in pairs
        if not any(weight in shared for path in (pair.first, pair.second) for weight in named[path].parameters())
    ]
    work = {
        pair: _positions(named[pair.first], trace.maps[pair.first][1])
        * sum(named[path].weight.numel() for path in (pair.first, pair.second))  # type: ignore[operator, union-attr]
        for pair in pairs
    }
    del trace, outputs
    with evaluating((model,)):
        pairs = unmixed(model, pairs, images)
        # Around a Vision Transformer, a map may be the second of one pair and the first of the next pair.
        tried = [pairs] if around is None else [[pair] for pair in pairs]
        return {pair: work[pair] for some in tried for pair in _cuttable(model, some, images)}, head


def _halved_(model: nn.Module, images: Tensor, others: set[str]) -> dict[str, nn.Module]:
    """Splits linear layers into two halves, in place, if they have twice as many outputs as the next layer has inputs.

    A layer stays unchanged if its path or the next layer's path is in `others`. Returns the original layers by path.
    """
    trace, named = _traced(model, images), dict(model.named_modules())
    maps = [path for path in trace.order if path in trace.maps]
    return {
        path: halve_(model, path)
        for path, after in pairwise(maps)
        if not {path, after} & others
        and {type(named[path]), type(named[after])} <= {nn.Linear, NativeLinear}
        and trace.maps[path][1][:-1] == trace.maps[after][0][:-1]
        and sides_of(named[path])[1] == 2 * sides_of(named[after])[0]
    }


def unmixed(model: nn.Module, pairs: Sequence[Pair], images: Tensor) -> list[Pair]:
    """Returns the pairs that do not mix units between their layers.

    Each entry of the second layer's input must depend only on the same entry of the first layer's output. If a
    convolution lies between the layers, an entry may also depend on the same unit at other positions. `images` contains
    one random image [1, channels, height, width].
    """
    separate = [False] * len(pairs)
    masks: dict[int, Tensor] = {}

    def change(index: int, part: nn.Module, _: object, output: Tensor) -> Tensor:
        last = units_last(part, output)
        if len(last) % 2:
            return output
        base = last.chunk(2)[0]
        has_convolution = any(isinstance(model.get_submodule(path), nn.Conv2d) for path in pairs[index].between)
        generator = torch.Generator().manual_seed(index)
        size = base.shape[-1:] if has_convolution else base.shape
        masks[index] = (torch.rand(size, generator=generator) < 0.5).to(base.device).expand(base.shape)
        changed = base + masks[index] * (1 + 4 * base.abs().max())
        both = torch.cat([base, changed])
        return both.movedim(-1, 1) if isinstance(part, CONVOLUTIONS) else both

    def compare(index: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        last = units_last(part, _first_tensor(args, kwargs))
        if index not in masks or last.shape != (2 * len(masks[index]), *masks[index].shape[1:]):
            return
        base, changed = last.chunk(2)
        difference, mask = (changed - base).abs(), masks.pop(index)
        largest = difference.amax()
        separate[index] = bool(largest > 0) and bool((difference * ~mask).amax() <= 1e-3 * largest)

    def repeat(_: nn.Module, __: object, output: Tensor) -> Tensor:
        return torch.cat([output.chunk(2)[0]] * 2)

    with ExitStack() as hooks:
        for index, pair in enumerate(pairs):
            first, second = model.get_submodule(pair.first), model.get_submodule(pair.second)
            hooks.enter_context(first.register_forward_hook(partial(change, index)))
            hooks.enter_context(second.register_forward_pre_hook(partial(compare, index), with_kwargs=True))
            for part in map(model.get_submodule, pair.between):
                if _is_map(part):  # a gate, whose inputs may contain changes of earlier pairs
                    hooks.enter_context(part.register_forward_hook(repeat))
        called(model, images.expand(2, *images.shape[1:]))
    return [pair for pair, is_separate in zip(pairs, separate, strict=True) if is_separate]


def _half(units: int, device: torch.device) -> Tensor:
    """Returns the sorted indices of a random half of the units (rounded up), drawn with a fixed seed."""
    drawn = torch.randperm(units, generator=torch.Generator().manual_seed(units), device="cpu")
    return drawn[: (units + 1) // 2].sort().values.to(device)


def _cuttable(model: nn.Module, pairs: Sequence[Pair], images: Tensor) -> list[Pair]:
    """Returns the pairs in which removing half of the hidden units does not change the other half."""

    def keep(call: ModuleCall) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        inputs = units_last(call.module, call.tokens)
        return call.module, (inputs[..., _half(inputs.shape[-1], inputs.device)], call.output)

    # For every second map: the half of its inputs that is kept, and its outputs.
    with recording_calls((model.get_submodule(pair.second) for pair in pairs), keep) as calls:
        expected = tensors_of(called(model, images))
    cut = partial(_cut, model, images=images, recorded=dict(calls), expected=expected)
    accepted: set[Pair] = set()
    left = list(pairs)
    # Each round tries pairs that share no map. If a pair fails, later rounds try other pairs with its maps.
    while together := _disjoint(left, {path for pair in accepted for path in (pair.first, pair.second)}):
        good = cut(together)
        # A pair that raises an error, or whose units another part reads, makes the whole round fail. Then each pair is
        # tried separately.
        accepted |= set(good if good is not None else (pair for pair in together if cut([pair])))
        left = [pair for pair in left if pair not in together]
    return [pair for pair in pairs if pair in accepted]


def _disjoint(pairs: Sequence[Pair], taken: set[str]) -> list[Pair]:
    """Chooses pairs in order, and skips each pair that has a layer in `taken` or in a pair chosen before."""
    chosen = []
    for pair in pairs:
        if not taken & {pair.first, pair.second}:
            chosen.append(pair)
            taken = taken | {pair.first, pair.second}
    return chosen


def _cut(
    model: nn.Module,
    pairs: Sequence[Pair],
    images: Tensor,
    recorded: Mapping[nn.Module, tuple[Tensor, Tensor]],
    expected: Mapping[str, Tensor],
) -> list[Pair] | None:
    """Runs the model with only half of each pair's hidden units, and returns the pairs that pass the test.

    A pair passes if its second layer receives the kept units unchanged. The second layer of every pair returns its
    recorded output, so all other modules get the same inputs as before. Returns None if the model raises an error or
    its outputs change.
    """
    passed = []

    def shorter(path: str, *args: Any, **kwargs: Any) -> Tensor:
        part = model.get_submodule(path)
        output = units_last(part, type(part).forward(part, *args, **kwargs))
        kept = output[..., _half(output.shape[-1], output.device)]
        return kept.movedim(-1, 1) if isinstance(part, CONVOLUTIONS) else kept

    def given(pair: Pair, *args: Any, **kwargs: Any) -> Tensor:
        second = model.get_submodule(pair.second)
        (inputs, output), found = recorded[second], units_last(second, _first_tensor(args, kwargs))
        if found.shape == inputs.shape and _are_close(inputs, found):
            passed.append(pair)
        return output

    with ExitStack() as stack:
        for pair in pairs:
            units = sides_of(model.get_submodule(pair.first))[1]
            mask = torch.zeros(units, dtype=torch.bool, device="cpu")
            mask[_half(units, mask.device)] = True
            stack.enter_context(replacing_forward(model.get_submodule(pair.first), partial(shorter, pair.first)))
            stack.enter_context(replacing_forward(model.get_submodule(pair.second), partial(given, pair)))
            for part in map(model.get_submodule, pair.between):
                halved = copy.deepcopy(part)
                keep_units_of_(halved, mask)
                stack.enter_context(replacing_forward(part, halved.forward))
        try:
            outputs = tensors_of(called(model, images))
        except Exception:  # the code of a module raises errors of any type
            return None
    is_same = outputs.keys() == expected.keys() and all(_are_close(expected[name], outputs[name]) for name in outputs)
    return passed if is_same else None


def _are_close(expected: Tensor, found: Tensor) -> bool:
    # Products of other shapes round differently. Mixed units would cause errors as large as the entries themselves.
    largest = max(float(expected.abs().max()), 1e-30) if expected.numel() else 1.0
    return expected.shape == found.shape and bool((expected - found).abs().max() <= 1e-3 * largest)
