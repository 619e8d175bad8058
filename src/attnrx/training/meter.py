"""Sums over the steps of an epoch, kept on the device so that no step waits for them."""

from collections.abc import Sequence

import torch

from attnrx.shapes import Tensor


class Meter:
    """Named sums in float64. A checkpoint in the middle of an epoch carries them, so the epoch's record does not depend on it."""

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names = tuple(names)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)

    def add_(self, values: Sequence[Tensor | float]) -> None:
        """Adds one value for every name."""
        self.sums += torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=self.sums.device) for value in values]
        )

    def reset_(self) -> None:
        """Begins a new epoch."""
        self.sums.zero_()

    def totals(self, sums: Tensor | None = None) -> dict[str, float]:
        """Gives the sums by name; `sums` may be those of all processes together."""
        values = (self.sums if sums is None else sums).tolist()
        return dict(zip(self.names, values, strict=True))
