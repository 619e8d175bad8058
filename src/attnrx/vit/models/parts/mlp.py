"""The MLP of a block, whose linear maps may be factored or split into halves, and the call of its C++ kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.vit.kernels.native_products import NativeLinear, may_run_natively, native_maps, runs_natively

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class Pair:
    """Two linear maps, between which every hidden unit can be pruned separately.

    `first` and `second` are the paths of the linear maps. `between` lists the paths of the depthwise convolutions,
    batch norms and gates between them. `block` is the path of the smallest module that runs both linear maps.
    `positions` is the number of positions per image at which the linear maps run. `unit_macs` is the number of MACs per
    image that the modules in `between` need for one hidden unit.
    """

    first: str
    second: str
    between: tuple[str, ...]
    block: str
    positions: int = 0
    unit_macs: int = 0


class LowRankLinear(nn.Module):
    """A matrix factored into two linear maps: y = second(first(x)).

    The two factors need fewer parameters and MACs than the matrix if `rank`, the number of features between them, is
    less than inputs * outputs / (inputs + outputs). The input is [*batch, inputs], and the output [*batch, outputs].
    """

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True):
        super().__init__()
        if not 1 <= rank <= min(inputs, outputs):
            raise InvalidInput(f"rank {rank} of a map from {inputs} to {outputs}: give 1..{min(inputs, outputs)}.")
        # One bias after both factors is enough, because a bias between them could be folded into it.
        self.first = NativeLinear(inputs, rank, bias=False)
        self.second = NativeLinear(rank, outputs, bias=bias)
        self.in_features, self.rank, self.out_features = inputs, rank, outputs

    def forward(self, features: Tensor) -> Tensor:  # TorchScript reads the types and does not understand shapes
        return self.second(self.first(features))


def rank_of(linear: nn.Module) -> int | None:
    """Returns the rank of a factored linear map, or None for a linear map that is not factored."""
    return linear.rank if isinstance(linear, LowRankLinear) else None


def hidden_units(mlps: Sequence[tuple[nn.Module, nn.Module]]) -> tuple[int, ...]:
    """Returns the number of hidden features between the two linear maps of every MLP."""
    firsts: list[Any] = [first for first, _ in mlps]
    return tuple(first.out_features for first in firsts)


class FusedMLP(nn.Module):
    """An MLP that computes fc2(act(fc1(x))). The linear maps fc1 and fc2 may be factored.

    In float32 inference on a CPU, one call of a C++ kernel computes the whole MLP if its activation is an exact GELU.
    The kernel works on blocks of tokens, so the hidden features stay in the cache. If a submodule has a hook, the
    submodules are called one by one, so that the hook runs.
    """

    def __init__(self, fc1: nn.Module, act: nn.Module, fc2: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = fc1, act, fc2

    def forward(self, features: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        if may_run_natively(features):
            first, second = linears_of(self.fc1), linears_of(self.fc2)
            linears, parts = (*first, *second), (self.fc1, self.act, self.fc2, *first, *second)
            weights = [linear.weight for linear in linears]
            is_native = first and second and runs_natively(features, *weights) and is_exact_gelu(self.act)
            if is_native and not any(part._forward_hooks or part._forward_pre_hooks for part in parts):
                # A GELU follows only the first map of the MLP. If that map is factored, it follows the second factor.
                gelus = [*[False] * (len(first) - 1), True, *[False] * len(second)]
                return native_maps(features, weights, [each.bias for each in linears], gelus)
        return self.fc2(self.act(self.fc1(features)))


def linears_of(part: nn.Module) -> tuple[NativeLinear, ...]:
    """Returns a tuple of a linear map, or of the two factors of a factored map, or () for any other module."""
    # Subclasses are excluded, because they may compute something else.
    if type(part) is NativeLinear:
        return (part,)
    return (part.first, part.second) if type(part) is LowRankLinear else ()


def is_exact_gelu(part: nn.Module) -> bool:
    """Returns whether a module is an nn.GELU without approximation, or a transformers wrapper of the exact GELU."""
    return (type(part) is nn.GELU and part.approximate == "none") or getattr(part, "act", None) is F.gelu


HALVES = ("first", "second")


class Halves(nn.Module):
    """A linear map split into the linear maps `first` and `second`, which each compute one half of the outputs.

    If one linear map of a gated MLP (SwiGLU) computes both the values and the gate, they are its two halves. The input
    is [*batch, inputs], and the output [*batch, outputs].
    """

    def __init__(self, whole: nn.Linear):
        super().__init__()
        self.first, self.second = _half_of(whole, 0), _half_of(whole, 1)

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([self.first(features), self.second(features)], -1)


def _half_of(whole: nn.Linear, which: int) -> nn.Linear:
    with torch.device("meta"):
        half = nn.Linear(whole.in_features, whole.out_features // 2, whole.bias is not None)
    for name, parameter in whole.named_parameters():
        part = parameter.detach().chunk(2)[which].clone()
        setattr(half, name, nn.Parameter(part, parameter.requires_grad))
    return half.train(whole.training)


def map_at(model: nn.Module, path: str) -> nn.Module:
    """Returns the module at a path. If PATH is a linear map, `PATH.first` and `PATH.second` select its halves."""
    whole, _, half = path.rpartition(".")
    owner = model.get_submodule(whole)
    if half in HALVES and isinstance(owner, nn.Linear):
        return _half_of(owner, HALVES.index(half))
    return model.get_submodule(path)


def set_parameter_(owner: nn.Module, name: str, value: Tensor, requires_grad: bool) -> None:
    """Replaces a module's own parameter (not a submodule's) with a tensor of any shape."""
    owner._parameters[name] = nn.Parameter(value.detach(), requires_grad)


def write_linear_(linear: Any, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"] | None) -> None:
    """Writes a weight and bias of any size into a linear map, in place. The module object stays the same."""
    is_trained = linear.weight.requires_grad
    set_parameter_(linear, "weight", weight, is_trained)
    if bias is None:
        linear._parameters["bias"] = None
    else:
        set_parameter_(linear, "bias", bias, is_trained if linear.bias is None else linear.bias.requires_grad)
    linear.out_features, linear.in_features = weight.shape


def resize_linears_(model: nn.Module, linears: Mapping[str, Sequence[int]]) -> None:
    """Replaces the linear map at each path with a new one of the given size (inputs, outputs), on the meta device."""
    for path, (inputs, outputs) in linears.items():
        before: Any = model.get_submodule(path)
        with torch.device("meta"):
            linear = nn.Linear(inputs, outputs, before.bias is not None)
        model.set_submodule(path, linear.train(before.training))


def halve_(model: nn.Module, path: str) -> nn.Module:
    """Replaces a linear map by its two halves, in place, and returns the original map."""
    whole: Any = model.get_submodule(path)
    model.set_submodule(path, Halves(whole).train(whole.training))
    return whole


def keep_units_of_(part: Any, keep: Bool[Tensor, "units"]) -> None:
    """Removes the units outside `keep` from a depthwise convolution, a batch norm or a gate, in place."""
    count = int(keep.sum())
    for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        if tensor.ndim:  # a batch norm's count of batches has no axis
            kept = tensor.detach()[keep.to(tensor.device)].clone() if not tensor.is_meta else tensor[:count]
            if name in part._parameters:
                part._parameters[name] = nn.Parameter(kept, tensor.requires_grad)
            else:
                part._buffers[name] = kept
    if isinstance(part, nn.Linear):
        part.out_features = count
    elif isinstance(part, nn.Conv2d):
        part.out_channels = count
        if part.groups > 1:  # a gate (groups=1) is a convolution over all channels
            part.groups = part.in_channels = count
    else:
        part.num_features = count


def sides_of(part: Any) -> tuple[int, int]:
    """Returns the number of inputs and the number of outputs of a linear map or convolution."""
    if isinstance(part, CONVOLUTIONS):
        return part.in_channels, part.out_channels
    return part.in_features, part.out_features
