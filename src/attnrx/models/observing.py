"""Watching every attention layer of a model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from attnrx.attention import Observed, using
from attnrx.models.family import Family
from attnrx.observation import Observation


@contextmanager
def observing(model: nn.Module, family: Family, observe: Callable[[int, Observation], None]) -> Iterator[None]:
    """Calls `observe(layer, observation)` for every layer of every forward pass made inside the context."""
    layers = family.attention(model)
    readouts = [
        layer.output.weight.detach().T.unflatten(0, (len(layer.spec.heads), layer.spec.head_dim)) for layer in layers
    ]
    backends = [Observed(partial(observe, index), readout) for index, readout in enumerate(readouts)]
    with using(layers, backends):
        yield
