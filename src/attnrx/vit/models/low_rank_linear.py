"""A linear map factored into two smaller ones."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.kernels.packed_linear import PackedLinear


class LowRankLinear(nn.Module):
    """y = second(first(x)): smaller and faster than one matrix below the break-even rank, in out / (in + out)."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True):
        super().__init__()
        if not 1 <= rank <= min(inputs, outputs):
            raise InvalidInput(f"rank {rank} of a map from {inputs} to {outputs}: give 1..{min(inputs, outputs)}.")
        # One bias, after both factors: a bias between them would be one more term of the second.
        self.first = PackedLinear(inputs, rank, bias=False)
        self.second = PackedLinear(rank, outputs, bias=bias)

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
