"""A running mean of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from attnrx.shapes import Tensor
from attnrx.training.sharding import own, put_


class WeightMean:
    """The exponential moving average of a model's parameters, sharded like them; buffers are shared with the model."""

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._live = dict(model.named_parameters())
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._live.items()}

    @torch.no_grad()
    def update_(self, step: int) -> None:
        """Updates the mean after `step` steps; the decay is smaller at first, to discard the initial weights."""
        decay = min(self._decay, (1 + step) / (10 + step))
        means, live = ([own(part) for part in parts.values()] for parts in (self.tensors, self._live))
        torch._foreach_lerp_(means, live, 1 - decay)

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores a saved mean."""
        for name, mean in self.tensors.items():
            put_(mean, tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps the mean into the model inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._live.items():
            live, mean = own(parameter), own(self.tensors[name])
            saved = live.clone()
            live.copy_(mean)
            mean.copy_(saved)

    @torch.no_grad()
    def store_(self) -> None:
        """Copies the mean into the model permanently."""
        for name, parameter in self._live.items():
            own(parameter).copy_(own(self.tensors[name]))
