"""A pre-norm block in one call of the C++ kernel, where nothing observes what is inside."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Float, Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.attention.attention import LayerPlan
from attnrx.vit.attention.backends.auto import Native
from attnrx.vit.attention.backends.capture import CapturedAttention, NativeCapture
from attnrx.vit.attention.forms import DenseForm
from attnrx.vit.attention.head_linear import HeadLinear, OutputProjection
from attnrx.vit.kernels.native_blocks import BlockTensors, native_block
from attnrx.vit.kernels.native_products import LEAST_ROWS, is_native
from attnrx.vit.models.mlp import FusedMLP, is_exact_gelu, linears_of

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

    The kernel computes it for inference in float32 on a CPU, for attention by products alone and an MLP with an exact
    GELU, unless a part has a hook or a `forward` of its own. Nothing of the weights is stored.

    Args:
        tokens: The input of the block.
        norms: The norms before attention and MLP.
        attention: The attention.
        mlp: The MLP.
        factors: Those of the two branches, if any.
        others: Modules that the block calls, and that change nothing in evaluation mode.
        outputs: How many tokens are computed, the first ones; default: all.
    """
    # In this order: a compiler traces what follows unless the call is recorded.
    if is_recorded() or not _takes(tokens) or type(attention) is not Attention or type(mlp) is not FusedMLP:
        return None
    plan = attention.plan(tokens)
    # From the dictionaries of the modules, as their attributes are found more slowly; only parts of exact classes are
    # used, whose weights are there.
    scores, inside = children(attention)["scores"], children(mlp)
    fc1, act, fc2 = inside["fc1"], inside["act"], inside["fc2"]
    first, second = linears_of(fc1), linears_of(fc2)
    maps = (*_projections(attention, scores, plan), *first, *second)
    parts = (*norms, attention, scores, mlp, fc1, act, fc2, *maps, *others)
    vectors = [*[tensor for norm in norms for tensor in weight_and_bias(norm)], *factors]
    tensors = [weight_and_bias(each) for each in maps]
    weights, biases = [weight for weight, _ in tensors], [bias for _, bias in tensors]
    has_gelu = is_exact_gelu(act)
    if (
        len(maps) < 4 + len(first) + len(second)
        or not (first and second)
        or not (has_gelu or type(act) is nn.Identity)
        or any(other.training for other in others)
        or not all(is_layer_norm(type(norm)) for norm in norms)
        or not all(map(is_idle, parts))
        or not all(map(is_native, weights))
        or not all(_is_vector(each, attention.spec.width) for each in vectors)
    ):
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


def children(module: nn.Module) -> dict[str, Any]:
    return module._modules


def weight_and_bias(module: nn.Module) -> tuple[Any, Any]:
    return module._parameters.get("weight"), module._parameters.get("bias")


def _takes(tokens: TokenBatch) -> bool:
    return (
        type(tokens) is Tensor
        and tokens.ndim == 3
        and tokens.dtype == torch.float32
        and tokens.device.type == "cpu"
        and tokens.shape[1] >= LEAST_ROWS
        and not torch.is_autocast_enabled("cpu")
        # Those of a counter of operations, for example, which counts by module.
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
    )


def _projections(attention: Attention, scores: nn.Module, plan: LayerPlan) -> tuple[nn.Module, ...]:
    """Returns the maps of queries, keys, values and outputs; empty where the kernel computes another attention."""
    spec = attention.spec
    # `joint`: the scores are products of the projected rows.
    if not plan.joint or type(plan.backend) not in (Native, NativeCapture) or type(scores) is not DenseForm:
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
