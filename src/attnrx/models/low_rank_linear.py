"""A linear map written as two thinner ones."""

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
        """Features between the two."""
        return self.first.out_features

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.first.in_features

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.second.out_features

    def forward(self, features: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Applies both."""
        return self.second(self.first(features))


def linear_of_rank(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    """Gives one linear map, or two factors of it where a rank is given."""
    return nn.Linear(inputs, outputs) if rank is None else LowRankLinear(inputs, outputs, rank)


def rank_of(linear: nn.Module) -> int | None:
    """Gives the rank of a map written as two, or None."""
    return linear.rank if isinstance(linear, LowRankLinear) else None
