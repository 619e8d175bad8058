"""A running mean of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from attnrx.shapes import Tensor
from attnrx.training.sharding import own, put_


class WeightMean:
    """The exponential mean of a model's parameters, in parts where they are; its buffers are shared with the model."""

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._live = dict(model.named_parameters())
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._live.items()}

    @torch.no_grad()
    def update_(self, step: int) -> None:
        """Moves the mean towards the weights after `step` steps; at first faster, to forget the random start."""
        decay = min(self._decay, (1 + step) / (10 + step))
        means, live = ([own(part) for part in parts.values()] for parts in (self.tensors, self._live))
        torch._foreach_lerp_(means, live, 1 - decay)

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts back a saved mean."""
        for name, mean in self.tensors.items():
            put_(mean, tensors[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Lets the model carry the mean for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._live.items():
            live, mean = own(parameter), own(self.tensors[name])
            kept = live.clone()
            live.copy_(mean)
            mean.copy_(kept)

    @torch.no_grad()
    def store_(self) -> None:
        """Returns the model the mean for good."""
        for name, parameter in self._live.items():
            own(parameter).copy_(own(self.tensors[name]))
