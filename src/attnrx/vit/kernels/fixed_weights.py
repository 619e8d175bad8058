"""Values that are computed of weights: in every call, or once, as constants of a graph that is recorded."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from attnrx.support.modules import is_recorded

Value = TypeVar("Value")


class _Fixed(threading.local):
    values: dict[tuple[int, Hashable], Any] | None = None


_FIXED = _Fixed()


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Computes every value of `of_weights` once in the context; the weights must not change meanwhile.

    A graph that is recorded in the context after a run of the model has these values as constants, such as one matrix
    for query, key and value, in place of the operations that compute them.
    """
    before, _FIXED.values = _FIXED.values, {}
    try:
        yield
    finally:
        _FIXED.values = before


def has_fixed_weights() -> bool:
    """Whether this thread is in the context of `fixed_weights`."""
    return _FIXED.values is not None


def of_weights(owner: object, key: Hashable, build: Callable[[], Value]) -> Value:
    """Returns what `build` computes of the weights of a module, which has one such value for each `key`.

    It is computed in every call, so that it is that of the present weights, however they were changed: on a CPU a cache
    whose entries were verified by a hash of the weights spared less than 3 % of a pass (ViT-Tiny, EVA-02 and BEiT-B,
    batch 1 and 8, one thread of a Xeon with AVX-512, 2026-11-28).
    """
    values = _FIXED.values
    if values is None:
        return build()
    name = id(owner), key
    if name not in values:
        if is_recorded():  # the value is part of the graph, and must not be stored
            return build()
        with torch.inference_mode(mode=False), torch.no_grad():
            values[name] = build()
    return values[name]
