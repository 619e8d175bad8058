"""A linear map factored into two smaller ones."""

import torch.nn.functional as F
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


class LowRankLinear(nn.Module):
    """y = second(first(x)): smaller and faster than one matrix below the break-even rank, in out / (in + out)."""

    def __init__(self, inputs: int, outputs: int, rank: int, bias: bool = True):
        super().__init__()
        if not 1 <= rank <= min(inputs, outputs):
            raise InvalidInput(f"rank {rank} of a map from {inputs} to {outputs}: give 1..{min(inputs, outputs)}.")
        self.first = nn.Linear(inputs, rank, bias=False)
        self.second = nn.Linear(rank, outputs, bias=bias)

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
        first, second = self.first, self.second
        if _is_plain(first) and _is_plain(second):  # with few tokens, calling a module takes as long as its arithmetic
            return F.linear(F.linear(features, first.weight), second.weight, second.bias)
        return second(first(features))


def _is_plain(linear: nn.Module) -> bool:
    """Returns whether the layer is an unchanged nn.Linear: not replaced, parametrized or hooked."""
    return type(linear) is nn.Linear and not (linear._forward_hooks or linear._forward_pre_hooks)


def rank_of(linear: nn.Module) -> int | None:
    """Returns the rank of a factored map, or None."""
    return linear.rank if isinstance(linear, LowRankLinear) else None
