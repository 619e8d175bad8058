"""A pre-norm block without the calls of its parts, where nothing observes these: one call of the C++ kernel, or the
operations of PyTorch alone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.attention.attention import LayerPlan
from attnrx.vit.attention.backends.auto import Fused, Native
from attnrx.vit.attention.backends.backend import Backend
from attnrx.vit.attention.backends.capture import AttentionCapture, CapturedAttention, NativeCapture
from attnrx.vit.attention.factors import ScoreFactors
from attnrx.vit.attention.forms import DenseForm
from attnrx.vit.attention.head_linear import HeadLinear, OutputProjection
from attnrx.vit.kernels.native_attention import JointFeatures
from attnrx.vit.kernels.native_blocks import BlockTensors, native_block
from attnrx.vit.kernels.native_products import LEAST_ROWS, is_native
from attnrx.vit.models.mlp import FusedMLP, is_exact_gelu, linears_of

# Backends whose attention is that of products alone, on a CPU and on other devices.
KERNELS, OPERATIONS = (Native, NativeCapture), (Fused, AttentionCapture)

Factor = Float[Tensor, " width"] | None


def fused_block(
    tokens: TokenBatch,
    norms: tuple[nn.Module, nn.Module],
    attention: nn.Module,
    mlp: nn.Module,
    factors: tuple[Factor, Factor] = (None, None),
    others: Sequence[nn.Module] = (),
    outputs: int | None = None,
) -> Float[Tensor, "batch outputs width"] | None:
    """Returns x + factors[1] * mlp(norms[1](x)) with x = tokens + factors[0] * attention(norms[0](tokens)).

    None where the parts have to be called one by one.

    For inference, for attention by products alone and an MLP with an exact GELU, unless a part has a hook or a
    `forward` of its own: in float32 on a CPU by the kernel; on other devices by the operations of the parts, because
    the calls of modules take longer than a GPU takes to run them. Nothing of the weights is stored.

    Args:
        tokens: The input of the block.
        norms: The norms before attention and MLP.
        attention: The attention.
        mlp: The MLP.
        factors: Those of the two branches, if any.
        others: Modules that the block calls, and that change nothing in evaluation mode.
        outputs: How many tokens are computed, the first ones; default: all.
    """
    if not may_be_fused(tokens) or not _takes(tokens):
        return None
    if type(attention) is not Attention or type(mlp) is not FusedMLP:
        return None
    on_cpu = tokens.device.type == "cpu"
    outputs = None if outputs == tokens.shape[1] else outputs
    plan = attention.plan(tokens)
    # From the dictionaries of the modules, as their attributes are found more slowly; only parts of exact classes are
    # used, whose weights are there.
    scores, inside = children(attention)["scores"], children(mlp)
    fc1, act, fc2 = inside["fc1"], inside["act"], inside["fc2"]
    first, second = linears_of(fc1), linears_of(fc2)
    maps = (*_projections(attention, scores, plan, KERNELS if on_cpu else OPERATIONS), *first, *second)
    parts = (*norms, attention, scores, mlp, fc1, act, fc2, *maps, *others)
    has_gelu = is_exact_gelu(act)
    if (
        len(maps) < 4 + len(first) + len(second)
        or not (first and second)
        or not (has_gelu or type(act) is nn.Identity)
        or any(other.training for other in others)
        or not all(is_layer_norm(type(norm)) for norm in norms)
        or not all(map(is_idle, parts))
    ):
        return None
    tensors = [weight_and_bias(each) for each in maps]
    if not on_cpu:
        heads = _heads(_normed(tokens, norms[0]), attention, plan, tensors[:3], outputs)
        if heads is None:
            return None
        mixed = F.linear(heads, *tensors[3])
        residual = tokens if outputs is None else tokens[:, :outputs]
        tokens = residual + (mixed if factors[0] is None else mixed * factors[0])
        hidden = _normed(tokens, norms[1])
        for weight, bias in tensors[4 : 4 + len(first)]:
            hidden = F.linear(hidden, weight, bias)
        hidden = F.gelu(hidden) if has_gelu else hidden
        for weight, bias in tensors[4 + len(first) :]:
            hidden = F.linear(hidden, weight, bias)
        return tokens + (hidden if factors[1] is None else hidden * factors[1])
    vectors = [*[tensor for norm in norms for tensor in weight_and_bias(norm)], *factors]
    weights, biases = [weight for weight, _ in tensors], [bias for _, bias in tensors]
    if not all(map(is_native, weights)) or not all(_is_vector(each, attention.spec.width) for each in vectors):
        return None
    gelus = [*[False] * (3 + len(first)), has_gelu, *[False] * len(second)]
    spec, backend, epsilons = attention.spec, plan.backend, [vars(norm)["eps"] for norm in norms]
    assert isinstance(backend, Native)
    block = BlockTensors(vectors, epsilons, weights, biases, gelus, spec.ranks, spec.value_dims, spec.scale)
    is_captured = isinstance(backend, NativeCapture)
    output, class_attention = native_block(tokens, block, backend.token_sizes(), outputs, is_captured)
    if is_captured:
        backend.receive(CapturedAttention(class_attention=class_attention))
    return output


def _heads(
    tokens: TokenBatch,
    attention: Attention,
    plan: LayerPlan,
    maps: Sequence[tuple[Tensor, Factor]],
    outputs: int | None,
) -> Float[Tensor, "batch outputs features"] | None:
    """Returns the outputs of all heads for the first `outputs` tokens, by weights and biases of queries, keys and
    values; None where these are not packed.
    """
    backend, scale, heads = plan.backend, attention.spec.scale, len(plan.rows)
    if outputs is None:
        joint = attention.packed([tensor for pair in maps for tensor in pair])
        if joint is None:
            return None
        features = F.linear(tokens, *joint)
        return backend.attend_fused_qkv(JointFeatures(features, plan.rows, plan.value_dims, scale))
    joint = attention.packed([tensor for pair in maps[1:] for tensor in pair])
    if joint is None:
        return None
    query = F.linear(tokens[:, :outputs], *maps[0]).unflatten(2, (heads, -1))
    key, value = F.linear(tokens, *joint).unflatten(2, (2, heads, -1)).unbind(2)
    factors = ScoreFactors(plan.buckets[0], query, key, None, scale)
    return backend.attend(factors, value.transpose(1, 2)).transpose(1, 2).flatten(2)


def _normed(tokens: TokenBatch, norm: Any) -> TokenBatch:
    values = vars(norm)
    return F.layer_norm(tokens, values["normalized_shape"], *weight_and_bias(norm), values["eps"])


def may_be_fused(tokens: TokenBatch) -> bool:
    """Whether a block of these tokens may be computed without the calls of its parts."""
    # First, because a compiler makes a guard of every attribute that it reads, and compares all of them in every call.
    return not is_recorded() and (tokens.dtype == torch.float32 or tokens.device.type != "cpu")


def children(module: nn.Module) -> dict[str, Any]:
    return module._modules


def weight_and_bias(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters.get("weight"), module._parameters.get("bias")


def _takes(tokens: TokenBatch) -> bool:
    return (
        type(tokens) is Tensor
        and tokens.ndim == 3
        and (tokens.shape[1] >= LEAST_ROWS or tokens.device.type != "cpu")
        and (tokens.is_meta or not torch.is_autocast_enabled(tokens.device.type))
        # Those of a counter of operations, for example, which counts by module.
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
    )


def _projections(
    attention: Attention, scores: nn.Module, plan: LayerPlan, backends: tuple[type[Backend], ...]
) -> tuple[nn.Module, ...]:
    """Returns the maps of queries, keys, values and outputs; empty where the attention is not that of the backends."""
    spec = attention.spec
    # `joint`: the scores are products of the projected rows.
    if not plan.joint or type(plan.backend) not in backends or type(scores) is not DenseForm:
        return ()
    of_scores, others = children(scores), children(attention)
    sides, output = (of_scores["query"], of_scores["key"], others["value"]), others["output"]
    if any(type(side) is not HeadLinear for side in sides) or type(output) is not OutputProjection:
        return ()
    if spec.pair_bias or spec.inner_norms or (plan.rows, plan.value_dims) != (sides[0].rows, spec.value_dims):
        return ()
    return *sides, output


def is_idle(part: nn.Module) -> bool:
    """Whether a part has neither hooks nor a `forward` of its own, so that its class says what it computes."""
    return not (part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__)


@lru_cache
def is_layer_norm(kind: type) -> bool:
    """Whether modules of a class compute what nn.LayerNorm does."""
    return kind is nn.LayerNorm or (kind.__name__ == "LayerNorm" and kind.__module__ == "timm.layers.norm")


def _is_vector(tensor: Any, width: int) -> bool:
    return tensor is None or (
        type(tensor) in (nn.Parameter, Tensor)
        and tensor.dtype == torch.float32
        and tensor.shape == (width,)
        and tensor.is_contiguous()
    )
