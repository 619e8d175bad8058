"""Sums over the steps of an epoch, stored on the device so that no step waits for a transfer."""

from collections.abc import Sequence

import torch

from attnrx.shapes import Float, Tensor


class Meter:
    """Named sums in float64; checkpoints within an epoch include them."""

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def add_(self, values: Sequence[Tensor | float]) -> None:
        """Adds one value for every name."""
        self.sums += torch.stack([self._one(value) for value in values])

    def _one(self, value: Tensor | float) -> Tensor:
        # torch.full does not synchronize with the GPU; copying a number there would.
        kind = {"dtype": self.sums.dtype, "device": self.sums.device}
        return value.to(**kind) if isinstance(value, Tensor) else torch.full((), value, **kind)

    def reset_(self) -> None:
        """Sets all sums to zero for a new epoch."""
        self.sums.zero_()

    def named(self, sums: Float[Tensor, "names"]) -> dict[str, float]:
        """Returns sums, of this process or of all processes, by name."""
        return dict(zip(self.names, sums.tolist(), strict=True))
