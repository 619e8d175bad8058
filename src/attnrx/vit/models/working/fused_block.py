"""Runs a pre-norm block without calling its submodules, if no hook observes them.

The block then runs as one call of a C++ kernel, or as a few calls of PyTorch functions. `fuse_` changes the class of
timm and transformers blocks, so that they try this fast path first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_not
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.attention.attention import LayerPlan
from attnrx.vit.attention.backends import (
    AttentionCapture,
    Auto,
    Bucket,
    CapturedAttention,
    Fused,
    Native,
    NativeCapture,
    ScoreFactors,
)
from attnrx.vit.attention.forms import DenseForm
from attnrx.vit.attention.head_linear import HeadLinear, OutputProjection
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.kernels.native_products import LEAST_ROWS, BlockTensors, KnownBlock, is_native, native_block
from attnrx.vit.models.parts.mlp import FusedMLP, is_exact_gelu, linears_of
from attnrx.vit.models.working.adopted import Adapter

# Backends whose attention consists only of matrix products. They are used on devices other than a CPU.
OPERATIONS = (Auto, Fused, AttentionCapture)

Factor = Float[Tensor, " width"] | None


class BlockModules(NamedTuple):
    """The modules of a pre-norm block.

    `norms` are the norms before the attention and before the MLP. `factors` are the layer scale weights of the two
    branches, or None for a branch without layer scale. `others` are modules of the block that are not called here, e.g.
    dropout.
    """

    norms: tuple[nn.Module, nn.Module]
    attention: nn.Module
    mlp: nn.Module
    factors: tuple[Factor, Factor] = (None, None)
    others: Sequence[nn.Module] = ()


def fused_block(
    tokens: TokenBatch, modules: BlockModules, outputs: int | None = None
) -> Float[Tensor, "batch outputs width"] | None:
    """Computes a block: x + factors[1] * mlp(norms[1](x)) with x = tokens + factors[0] * attention(norms[0](tokens)).

    Returns None if the submodules must be called one by one. Blocks are fused only for inference. The attention must
    consist of matrix products, and the MLP must have an exact GELU or no activation. No submodule may have a hook or a
    replaced `forward`.

    In float32 on a CPU, a C++ kernel computes the block. On other devices, PyTorch functions are called directly,
    because on a GPU, calling the modules takes longer than the computation. Weights are not copied. For the kernel,
    only the memory addresses of the weights are cached. The cache is kept outside the modules, and every call checks
    whether the addresses are still valid.

    Args:
        tokens: The input of the block.
        modules: The modules of the block.
        outputs: The number of leading tokens for which to compute outputs. By default, all tokens.
    """
    attention = modules.attention
    # If global hooks exist, parts are called one by one. An operation counter, for example, counts by module.
    if (
        not may_be_fused(tokens)
        or type(tokens) is not Tensor
        or tokens.ndim != 3
        or (tokens.shape[1] < LEAST_ROWS and tokens.device.type == "cpu")
        or (not tokens.is_meta and torch.is_autocast_enabled(tokens.device.type))
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or type(attention) is not Attention
        or type(modules.mlp) is not FusedMLP
    ):
        return None
    if tokens.device.type != "cpu":
        return _by_operations(tokens, modules, attention, outputs)
    plan, known = attention.plan(tokens), _KNOWN.get(attention)
    if known is None or not known.is_current(plan, modules):
        known = _known_block(attention, plan, modules)
        if known is None:
            return None
        if known.block.is_exact:
            _KNOWN[attention] = known
    backend = plan.backend
    assert isinstance(backend, Native)
    is_captured = isinstance(backend, NativeCapture)
    output, class_attention = native_block(tokens, known.block, backend.token_sizes(), outputs, is_captured)
    if is_captured:
        backend.receive(CapturedAttention(class_attention=class_attention))
    return output


class _Known:
    """A cached block for the kernel. It stays valid as long as its modules and their settings are the same objects.

    Checking the cache takes 20 us, while inspecting the modules in every call would take 100 us. For comparison, a
    ViT-Tiny block takes 1,400 us. The cache holds no reference to the attention module, so the module can be freed.
    """

    def __init__(self, block: KnownBlock, plan: LayerPlan, modules: BlockModules, parts: Sequence[nn.Module]):
        self.block, self._plan = block, plan
        self._given = (*modules.norms, modules.mlp, *modules.factors, *modules.others)
        attention: Any = modules.attention
        # Each entry holds a module's dictionary, a key, and the value under this key.
        self._found: list[tuple[dict[str, Any], str, Any]] = [(vars(attention), "spec", attention.spec)]
        for part in parts:
            own = vars(part)
            self._found += [(own, name, own[name]) for name in ("eps", "approximate", "training") if name in own]
            for inside in (part._modules, part._parameters):
                self._found += [(inside, name, value) for name, value in inside.items()]
        self._dicts = [vars(part) for part in parts]
        self._parts = [part for part in parts if part is not attention]
        self._classes = list(map(type, self._parts))

    def is_current(self, plan: LayerPlan, modules: BlockModules) -> bool:
        """Returns whether this cached block was built from these modules in their present state."""
        now = (*modules.norms, modules.mlp, *modules.factors, *modules.others)
        if plan is not self._plan or len(now) != len(self._given) or any(map(is_not, now, self._given)):
            return False
        for found, name, value in self._found:
            if found.get(name) is not value:
                return False
        for own in self._dicts:
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return False
        return not any(map(is_not, map(type, self._parts), self._classes)) and self.block.is_current()


# Keys are attention modules, so neither a block nor its copies store anything from a call.
_KNOWN: WeakKeyDictionary[Attention, _Known] = WeakKeyDictionary()


def _known_block(attention: Attention, plan: LayerPlan, modules: BlockModules) -> _Known | None:
    """Prepares the kernel's block for these modules, or returns None if the modules must be called one by one."""
    norms, spec, known = modules.norms, attention.spec, _known_parts(modules, attention)
    # `joint` means that all scores are products of the projected rows.
    if known is None or not plan.joint or type(plan.backend) not in (Native, NativeCapture):
        return None
    projections, first, second, has_gelu, parts = known
    if spec.pair_bias or spec.inner_norms or (plan.rows, plan.value_dims) != (projections[0].rows, spec.value_dims):
        return None
    parts = (*parts, *first, *second)
    if any(other.training for other in modules.others) or not all(map(is_idle, parts)):
        return None
    tensors = [weight_and_bias(each) for each in (*projections, *first, *second)]
    vectors = [*[tensor for norm in norms for tensor in weight_and_bias(norm)], *modules.factors]
    weights, biases = [weight for weight, _ in tensors], [bias for _, bias in tensors]
    if not all(map(is_native, weights)) or not all(_is_vector(each, spec.width) for each in vectors):
        return None
    gelus = [*[False] * (3 + len(first)), has_gelu, *[False] * len(second)]
    epsilons = [vars(norm)["eps"] for norm in norms]
    block = BlockTensors(vectors, epsilons, weights, biases, gelus, spec.ranks, spec.value_dims, spec.scale)
    return _Known(KnownBlock(block), plan, modules, parts)


def _known_parts(modules: BlockModules, attention: Attention) -> tuple[Any, ...] | None:
    """Returns the submodules of a block that the kernel reads, or None if a submodule has an unsupported class.

    The result contains the four attention projections, the linear layers of the MLP's first map, the linear layers of
    its second map (a factored map has two layers), whether a GELU lies between the two maps, and all submodules.
    """
    # Parts are read from the modules' dictionaries, which is faster than reading attributes. Only exact classes are
    # accepted, so all weights exist.
    inside, (fc1, act, fc2) = children(attention), children(modules.mlp).values()
    scores, first, second, has_gelu = inside["scores"], linears_of(fc1), linears_of(fc2), is_exact_gelu(act)
    if type(scores) is not DenseForm or not (first and second and (has_gelu or type(act) is nn.Identity)):
        return None
    sides, value, output = children(scores), inside["value"], inside["output"]
    query, key = sides["query"], sides["key"]
    if not type(query) is type(key) is type(value) is HeadLinear or type(output) is not OutputProjection:
        return None
    if not all(map(is_layer_norm, map(type, modules.norms))):
        return None
    projections = query, key, value, output
    parts = (*modules.norms, attention, scores, *projections, modules.mlp, fc1, act, fc2, *modules.others)
    return projections, first, second, has_gelu, parts


def _by_operations(
    tokens: TokenBatch, modules: BlockModules, attention: Attention, outputs: int | None
) -> TokenBatch | None:
    """Computes a block with PyTorch functions, or returns None if the submodules must be called one by one.

    For few tokens, the checks take a noticeable share of the time, so no condition is checked twice.
    """
    norms, factors, backend = modules.norms, modules.factors, attention.backend
    if attention.equal_heads is None or type(backend) not in OPERATIONS:
        return None
    known = _known_parts(modules, attention)
    if known is None:
        return None
    (query, key, value, output), first, second, has_gelu, parts = known
    for part in parts if len(first) == len(second) == 1 else (*parts, *first, *second):
        if part._forward_hooks or part._forward_pre_hooks or part.training or "forward" in part.__dict__:
            return None
    normed, scale = _normed(tokens, norms[0]), attention.spec.scale
    sides = (*weight_and_bias(query), *weight_and_bias(key), *weight_and_bias(value))
    heads, width = attention.equal_heads
    if outputs is None or outputs == tokens.shape[1]:
        joint = attention.packed(sides)
        if joint is None:
            return None
        dims = (width,) * heads
        mixed = backend.attend_fused_qkv(JointFeatures(F.linear(normed, *joint), dims, dims, scale))
    else:
        joint = attention.packed(sides[2:])
        if joint is None:
            return None
        queries = F.linear(normed[:, :outputs], *sides[:2]).unflatten(2, (heads, width))
        keys, values = F.linear(normed, *joint).unflatten(2, (2, heads, width)).unbind(2)
        features = ScoreFactors(Bucket(0, heads, width, width), queries, keys, None, scale)
        mixed = backend.attend(features, values.transpose(1, 2)).transpose(1, 2).flatten(2)
        tokens = tokens[:, :outputs]
    mixed = F.linear(mixed, *weight_and_bias(output))
    tokens = tokens + (mixed if factors[0] is None else mixed * factors[0])
    hidden = _mapped(_normed(tokens, norms[1]), first)
    hidden = _mapped(F.gelu(hidden) if has_gelu else hidden, second)
    return tokens + (hidden if factors[1] is None else hidden * factors[1])


def _mapped(features: Float[Tensor, "batch tokens _"], maps: Sequence[nn.Module]) -> Float[Tensor, "batch tokens _"]:
    for each in maps:
        features = F.linear(features, *weight_and_bias(each))
    return features


def _normed(tokens: TokenBatch, norm: Any) -> TokenBatch:
    values = vars(norm)
    return F.layer_norm(tokens, values["normalized_shape"], *weight_and_bias(norm), values["eps"])


def may_be_fused(tokens: TokenBatch) -> bool:
    """Returns whether a block may process these tokens without calling its submodules."""
    # `is_recorded` comes first, because torch.compile would check every other attribute again in every call.
    return not is_recorded() and (tokens.dtype == torch.float32 or tokens.device.type != "cpu")


def children(module: nn.Module) -> dict[str, Any]:
    return module._modules


def weight_and_bias(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters.get("weight"), module._parameters.get("bias")


def is_idle(part: nn.Module) -> bool:
    """Returns whether a module has neither hooks nor a replaced `forward`, so it runs its class's own code."""
    return not (part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__)


@lru_cache
def is_layer_norm(kind: type) -> bool:
    """Returns whether modules of a class compute the same as nn.LayerNorm."""
    return kind is nn.LayerNorm or (kind.__name__ == "LayerNorm" and kind.__module__ == "timm.layers.norm")


def _is_vector(tensor: Any, width: int) -> bool:
    return tensor is None or (
        type(tensor) in (nn.Parameter, Tensor)
        and tensor.dtype == torch.float32
        and tensor.shape == (width,)
        and tensor.is_contiguous()
    )


@dataclass(frozen=True)
class BlockParts:
    """The names of a pre-norm block's submodules, except `mlp`.

    `attention` is the name of an `Adapter`. `norms` names the norms before attention and MLP, and `scales` names the
    layer scales of both branches. `others` names modules that have no effect in evaluation mode, e.g. dropout.
    """

    attention: str
    norms: tuple[str, str]
    scales: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


DINOV2 = BlockParts("attention", ("norm1", "norm2"), ("layer_scale1", "layer_scale2"), ("drop_path",))
# Classes are named by texts, so no library has to be imported.
BLOCKS: Mapping[str, BlockParts] = {
    "timm.models.vision_transformer.Block": BlockParts(
        "attn", ("norm1", "norm2"), ("ls1", "ls2"), ("drop_path1", "drop_path2")
    ),
    "transformers.models.vit.modeling_vit.ViTLayer": BlockParts(
        "attention", ("layernorm_before", "layernorm_after"), others=("dropout",)
    ),
    "transformers.models.dinov2.modeling_dinov2.Dinov2Layer": DINOV2,
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersLayer": DINOV2,
}


class FusedBlock(nn.Module):
    """A mixin class with the fused forward pass, which `fuse_` combines with the library's class of a block."""

    names: BlockParts

    def forward(self, *args: Any, **options: Any) -> Any:
        tokens: Any = args[0] if args else options["hidden_states"]
        # Models also pass options, e.g. is_causal=False. The kernel takes no mask, so only None and False are allowed.
        others = (*args, *options.values())
        is_plain = all(each is None or each is False or each is tokens for each in others)
        fused = self._fused(tokens) if is_plain and may_be_fused(tokens) else None
        return super().forward(*args, **options) if fused is None else fused

    def _fused(self, tokens: TokenBatch) -> TokenBatch | None:
        """Returns the output of `fused_block`, or None if the submodules must be called one by one."""
        # Parts are read from the dictionary, because `nn.Module.__getattr__` takes longer than all comparisons here.
        parts, names = children(self), self.names
        adapter, scales = parts[names.attention], [parts[name] for name in names.scales]
        if not (isinstance(adapter, Adapter) and is_idle(adapter) and all(_is_scale(type(scale)) for scale in scales)):
            return None
        first, second = [next(iter(scale._parameters.values()), None) for scale in scales] or (None, None)
        others = (*scales, *[parts[name] for name in names.others])
        norms = parts[names.norms[0]], parts[names.norms[1]]
        modules = BlockModules(norms, children(adapter)["attention"], parts["mlp"], (first, second), others)
        # In the last block, `tokens` may be only an image's first tokens. `entered` then holds all tokens.
        entered = tokens if adapter.call.entered is None else adapter.call.entered[0]
        fused = fused_block(entered, modules, tokens.shape[1])
        if fused is not None:
            adapter.call.entered = None
        return fused

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty_block, (type(self).__bases__[1],), self.__getstate__()


@lru_cache
def _fused_class(kind: type[nn.Module]) -> type[nn.Module]:
    # The class keeps its name, because transformers finds its blocks by name.
    names = {"names": BLOCKS[_name(kind)], "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (FusedBlock, kind), names)


def _empty_block(kind: type[nn.Module]) -> nn.Module:
    """Returns a block without attributes, in which pickle then restores the saved attributes."""
    fused = _fused_class(kind)
    return fused.__new__(fused)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def fuse_(block: nn.Module) -> None:
    """Changes a block's class in place if BLOCKS lists it. Submodules, parameters and hooks stay the same."""
    if _name(type(block)) in BLOCKS and not isinstance(block, FusedBlock):
        block.__class__ = _fused_class(type(block))


@lru_cache
def _is_scale(kind: type) -> bool:
    """Returns whether a class is nn.Identity, or a layer scale of timm or of transformers' DINOv2."""
    is_of_library = _name(kind).startswith(("timm.layers.", "transformers.models.dinov2"))
    return kind is nn.Identity or (is_of_library and kind.__name__.endswith("LayerScale"))
