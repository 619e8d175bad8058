"""The MLP of a block: its linear maps, whole or factored, and its call of the C++ kernel."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.native_products import NativeLinear, native_maps, runs_natively


class LowRankLinear(nn.Module):
    """y = second(first(x)): smaller and faster than one matrix below the break-even rank, in out / (in + out)."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True):
        super().__init__()
        if not 1 <= rank <= min(inputs, outputs):
            raise InvalidInput(f"rank {rank} of a map from {inputs} to {outputs}: give 1..{min(inputs, outputs)}.")
        # One bias, after both factors: a bias between them would be one more term of the second.
        self.first = NativeLinear(inputs, rank, bias=False)
        self.second = NativeLinear(rank, outputs, bias=bias)

    @property
    def rank(self) -> int:
        """Features between the two factors."""
        return self.first.out_features

    @property
    def in_features(self) -> int:
        return self.first.in_features

    @property
    def out_features(self) -> int:
        return self.second.out_features

    def forward(self, features: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return self.second(self.first(features))


def rank_of(linear: nn.Module) -> int | None:
    """Returns the rank of a factored map, or None."""
    return linear.rank if isinstance(linear, LowRankLinear) else None


def hidden_units(mlps: Sequence[tuple[nn.Module, nn.Module]]) -> tuple[int, ...]:
    """Returns the number of features between the two maps of every MLP."""
    firsts: list[Any] = [first for first, _ in mlps]
    return tuple(first.out_features for first in firsts)


class FusedMLP(nn.Module):
    """fc2(act(fc1(x))); each of the two maps is one matrix or factored.

    For inference in float32 on a CPU with an exact GELU, one call of the kernel computes all of it, in blocks of tokens
    whose hidden features stay in the cache. A hook on a part gets the part's own call.
    """

    def __init__(self, fc1: nn.Module, act: nn.Module, fc2: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = fc1, act, fc2

    def forward(self, features: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        first, second = linears_of(self.fc1), linears_of(self.fc2)
        if not (first and second and self._is_fused(features, (*first, *second))):
            return self.fc2(self.act(self.fc1(features)))
        # Whether a GELU follows each map: after the last factor of the first map only.
        gelus = [*[False] * (len(first) - 1), True, *[False] * len(second)]
        linears = (*first, *second)
        return native_maps(features, [each.weight for each in linears], [each.bias for each in linears], gelus)

    def _is_fused(self, features: Tensor, linears: Sequence[NativeLinear]) -> bool:
        # In this order: a compiler traces what follows unless the call is recorded.
        if not runs_natively(features, *[linear.weight for linear in linears]):
            return False
        parts = (self.fc1, self.act, self.fc2, *linears)
        return is_exact_gelu(self.act) and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def linears_of(part: nn.Module) -> tuple[NativeLinear, ...]:
    """Returns the linear maps of which a map consists: itself, or its factors; empty for other modules."""
    # The exact classes: a subclass may compute something else.
    if type(part) is NativeLinear:
        return (part,)
    return (part.first, part.second) if type(part) is LowRankLinear else ()


def is_exact_gelu(part: nn.Module) -> bool:
    """Whether a module computes the GELU by the error function: that of PyTorch, or the wrapper of transformers."""
    return (type(part) is nn.GELU and part.approximate == "none") or getattr(part, "act", None) is F.gelu
