"""Models that no reader reads: of these the hidden units of MLPs are read (`separate_units`), and nothing else.

Swin, Hiera, SAM, PVT, SegFormer, MaxViT, ConvNeXt and decoders have MLPs like every Vision Transformer, and units can
be removed from any of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnrx.support.arguments import described_error, user_code
from attnrx.support.errors import NotSupported
from attnrx.support.modules import random_images
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Float, ImageBatch, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.costs import ModelCosts, PartCosts, layer_costs
from attnrx.vit.costs.model_costs import frozen
from attnrx.vit.kernels.native_products import NativeLinear, native_
from attnrx.vit.models.adopted import Adopted, Origin
from attnrx.vit.models.adopted_family import AdoptedFamily, matrix_entries, mlp_costs, num_params
from attnrx.vit.models.family import LayerShapes, num_outputs
from attnrx.vit.models.mlp import Pair, halve_, hidden_units
from attnrx.vit.models.module_inputs import called, inputs_of
from attnrx.vit.models.observation_hooks import evaluating
from attnrx.vit.models.parts import ModelParts, model_name, require_parts
from attnrx.vit.models.separate_units import separate_pairs
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout

# The sides of images that are tried on a model that does not state its own.
SIDES = (224, 256, 384, 512, 1024, 192, 128, 96, 64, 32)


class Convolution(nn.Module):
    """A convolution of [batch, channels, height, width] by a linear map of patches of channels * kernel features."""

    def __init__(self, linear: nn.Module, kernel: tuple[int, int], **geometry: Any):
        """`geometry` are stride, padding and dilation."""
        super().__init__()
        self.linear, self.kernel, self.geometry = linear, kernel, geometry

    def forward(self, maps: Float[Tensor, "batch inputs height width"]) -> Float[Tensor, "batch outputs rows columns"]:
        linear: Any = self.linear
        # Who observes or replaces the linear map gets the features of a position last, as everywhere; a convolution
        # needs no copy of them in that order.
        is_watched = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
        if not is_watched and type(linear) is NativeLinear and linear.weight.numel():
            weight = linear.weight.unflatten(1, (maps.shape[1], *self.kernel))
            return F.conv2d(maps, weight, linear.bias, **self.geometry)
        if self.kernel == (1, 1):
            return linear(maps.movedim(1, -1)).movedim(-1, 1)
        sizes = zip(maps.shape[2:], self.kernel, *self.geometry.values(), strict=True)
        rows, _ = ((size + 2 * pad - step * (wide - 1) - 1) // stride + 1 for size, wide, stride, pad, step in sizes)
        return linear(F.unfold(maps, self.kernel, **self.geometry).mT).mT.unflatten(2, (rows, -1))


class UnitsModel(Adopted):
    """A module of any class, `source`, of which the hidden units of MLPs are read and nothing else."""

    outer_macs = 0
    head = ""


class UnitsFamily(AdoptedFamily):
    """Modules of any class with MLPs whose units are separate; `WholeFamily` adopts them, as modules of users.

    A layer is one MLP. Its attention has no heads, whatever the module has around it.
    """

    name = "units"
    library = ""
    model_type = UnitsModel

    def adopts(self, model: nn.Module) -> bool:
        return True

    def parts(self, source: nn.Module) -> ModelParts:
        return ModelParts((), "", "", "", mlp_classes=(), pooling="parts that are not read")

    def origin_inside(self, model: nn.Module) -> Origin:
        """Returns the input format: the first stated or common size that the module runs at.

        Raises:
            NotSupported: It runs at none of them.
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
        """Changes nothing, as the module has no position embeddings that are read."""

    def resize_inside_(self, adopted: Adopted, height: int, width: int) -> None:
        shape = (adopted.origin.input_shape[0], height, width)
        with user_code(f"{adopted.origin.architecture} does not take images of {height} x {width}: it", NotSupported):
            self._measure_(adopted, shape)
        adopted.origin = replace(adopted.origin, input_shape=shape)

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        """Makes the maps of all pairs linear maps; finds the pairs where they are not known."""
        found = self._units(adopted)
        if not found.pairs:
            pairs, head = separate_pairs(found.source, found.origin.input_shape)
            vars(found).update(pairs=pairs, head=head)
            if not found.pairs:
                raise NotSupported(
                    f"{model_name(found.source)} has no reader, and no MLP of two linear maps or 1 x 1 convolutions "
                    "with only an activation, a dropout, a gate, a depthwise convolution or a batch norm between them."
                )
        for pair in found.pairs:
            for path in (pair.first, pair.second, *pair.between):
                part: Any = found.source.get_submodule(path)
                if isinstance(part, nn.Linear):
                    native_(part)
                elif path not in pair.between:
                    weight = nn.Parameter(part.weight.detach().flatten(1), part.weight.requires_grad)
                    with torch.device("meta"):
                        linear = NativeLinear(weight.shape[1], weight.shape[0], part.bias is not None)
                    linear.weight, linear.bias = weight, part.bias
                    geometry = {"stride": part.stride, "padding": part.padding, "dilation": part.dilation}
                    convolution = Convolution(linear, part.kernel_size, **geometry)
                    found.source.set_submodule(path, convolution.train(part.training))
        if not next(found.source.parameters()).is_meta and not found.pairs[0].positions:
            self._measure_(found, found.origin.input_shape)

    def _measure_(self, adopted: Adopted, shape: tuple[int, int, int]) -> None:
        """Measures the places that every MLP runs at, and the MACs of all else, in a forward pass."""
        found, maps = self._units(adopted), self.mlp(adopted)
        macs = macs_by_part(found.source, random_images(found.source, shape, 1))
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
        """Returns the shapes of attention that is not read: it has no heads, and costs nothing."""
        return tuple(
            AttentionSpec("dense", second.out_features, 1, (), (), 1.0, 1, biases=())  # type: ignore[arg-type]
            for _, second in self.mlp(model)
        )

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Changes nothing: the attention that is not read has no heads."""

    def reads_attention(self, model: nn.Module) -> bool:
        return False

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(f"source.{pair.block}".rstrip(".") for pair in self._units(model).pairs)

    def describe(self, model: nn.Module) -> dict[str, Any]:
        found = self._units(model)
        pairs = [to_dict(pair) for pair in found.pairs]
        own = {"attention": [], "pairs": pairs, "outer_macs": found.outer_macs, "head": found.head}
        return {**super().describe(model), **own}

    def shaped(self, created: nn.Module, description: Mapping[str, Any]) -> Adopted:
        adopted = UnitsModel(created, self.described_origin(description))
        pairs = tuple(from_dict(pair, (Pair,)) for pair in description["pairs"])
        vars(adopted).update(pairs=pairs, outer_macs=description["outer_macs"], head=description["head"])
        named = dict(created.named_modules())
        for pair in pairs:
            whole = pair.first.rpartition(".")[0]
            if pair.first not in named and isinstance(named.get(whole), nn.Linear):
                halve_(created, whole)
        paths = [path for pair in pairs for path in (pair.first, pair.second, *pair.between)]
        require_parts(created, paths, adopted.origin.architecture)
        self._install_(adopted, ())
        self._shape_mlps_(adopted, description)
        return adopted

    def token_layout(self, model: nn.Module) -> TokenLayout:
        raise NotSupported(
            f"the attention of {self._units(model).origin.architecture} has no reader, so tokens cannot be pruned or "
            "merged, and attention maps are not shown: prescribe hidden=..., e.g. hidden=total_rank:0.5."
        )

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        found = self._units(model)
        head = found.source.get_submodule(found.head) if found.head else nn.Identity()
        return (head,) if num_outputs(head) else ()

    def positions(self, adopted: Adopted) -> int:
        return 1  # every MLP has positions of its own

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        """Returns the costs of the MLPs; all other parts count as patches."""
        found, maps = self._units(model), self.mlp(model)
        before = hidden_units(maps)
        layers, inside = [], 0
        for pair, linears, spec, ranks_of, count, now in zip(
            found.pairs, maps, shapes.attention, shapes.mlp_ranks, shapes.hidden, before, strict=True
        ):
            between = sum(num_params(found.source.get_submodule(path)) for path in pair.between)
            inside += between + sum(map(num_params, linears))
            mlp = mlp_costs(linears, pair.positions, linears, ranks_of, count)
            mlp += PartCosts(between * count // max(now, 1), pair.unit_macs * count)
            layers.append(layer_costs(spec, pair.positions, mlp, PartCosts()))
        outside = PartCosts(num_params(found.source) - inside, found.outer_macs)
        return ModelCosts(outside, tuple(layers), PartCosts(), 0)

    def _units(self, model: nn.Module) -> UnitsModel:
        return self._adopted(model)  # type: ignore[return-value]


def macs_by_part(model: nn.Module, images: ImageBatch) -> dict[str, int]:
    """Returns the multiply-accumulates of a forward pass by the paths of the parts, "" for the model itself."""
    with evaluating((model,)), frozen(model), FlopCounterMode(display=False) as counter:
        called(model, images)
    # The names of the parts begin with that of the class. Two operations are one MAC.
    counts, root = counter.get_flop_counts(), f"{type(model).__name__}."
    return {f"{name}.".removeprefix(root)[:-1]: sum(each.values()) // 2 for name, each in counts.items()}


def _shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Yields the shapes of images that a module may take: those that it states first."""
    if inputs := inputs_of(model):
        yield inputs.shape
        return
    parts = list(model.modules())
    convolution = next((part for part in parts if isinstance(part, nn.Conv2d)), None)
    facts: Any = getattr(model, "pretrained_cfg", None) or {}
    config = getattr(model, "config", None)
    own = tuple(facts.get("input_size") or ())
    hints = [getattr(part, name, None) for part in parts for name in ("img_size", "image_size")]
    hints += [getattr(config, "image_size", None), own[1:], *_position_sides(parts, convolution)]
    if convolution is None and not any(hints):
        return
    # The first convolution need not be one of the images, e.g. after a cosine transform.
    first = 3 if convolution is None else convolution.in_channels
    stated_channels = getattr(config, "num_channels", None)
    for hint in dict.fromkeys([*(tuple(hint) if isinstance(hint, list) else hint for hint in hints), *SIDES]):
        sides = (hint, hint) if isinstance(hint, int) else hint
        if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) and side > 0 for side in sides):
            for channels in dict.fromkeys((stated_channels or first, *own[:1])):
                yield channels, sides[0], sides[1]


def _position_sides(parts: Sequence[nn.Module], convolution: nn.Conv2d | None) -> list[int]:
    """Returns the sides of square images that position embeddings, [1, tokens, width], may be made for."""
    linear = next((part for part in parts if isinstance(part, nn.Linear)), None)
    if convolution is not None:
        patch = convolution.stride[0]
    else:  # pixels of three channels in a row
        patch = math.isqrt(linear.in_features // 3) if linear is not None else 0
    counts = {
        tensor.shape[1] - prefix
        for part in parts
        for tensor in part.parameters(recurse=False)
        if tensor.ndim == 3 and len(tensor) == 1
        for prefix in range(6)
    }
    return [patch * math.isqrt(count) for count in sorted(counts) if count > 3 and math.isqrt(count) ** 2 == count]
