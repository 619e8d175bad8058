"""Values derived from parameters, cached while no gradients are needed and the parameters have the same content."""

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch

from attnrx.support.modules import is_recorded
from attnrx.support.shapes import Tensor
from attnrx.vit.kernels.compilation import kernel_threads, native_library

Value = TypeVar("Value")


class _Fixed(threading.local):
    active = False


_FIXED = _Fixed()


@contextmanager
def fixed_weights() -> Iterator[None]:
    """Keeps every cached value that is computed in the context until its end, without hashes of the parameters.

    A graph that is recorded in the context after a run of the model has these values as constants, such as one matrix
    for query, key and value, in place of the operations that compute them. The parameters must not change meanwhile.
    """
    before, _FIXED.active = _FIXED.active, True
    try:
        yield
    finally:
        _FIXED.active = before


def has_fixed_weights() -> bool:
    """Whether this thread is in the context of `fixed_weights`."""
    return _FIXED.active


class CachedWeights(Generic[Value]):
    """A value that `build` computes from parameters, cached until the content of one of them, or `key`, changes.

    Every use reads all parameters and compares a hash of 64 bits of their bytes, because PyTorch counts only some of
    the ways to change a tensor: not those through `.data`, a NumPy view, or a fused optimizer. So the value is that of
    the present weights, however they were changed. The value is computed in every call, and not stored, while
    gradients are enabled or a graph is recorded, and for parameters on devices other than a CPU, where reading the hash
    would wait for the device. A copy of the owning module, or a pickled one, has its own cache.
    """

    def __init__(self):
        self._kept: tuple[tuple[Hashable, ...], Value] | None = None

    def __call__(self, key: Hashable, parameters: Sequence[Tensor | None], build: Callable[[], Value]) -> Value:
        """Returns the value, from the cache if that is safe; a parameter may be None."""
        if _FIXED.active:
            # A value that is built while a graph is recorded is part of the graph, and must not be stored.
            if is_recorded() and (self._kept is None or self._kept[0] != (_FIXED, key)):
                return build()
            state: tuple[Hashable, ...] = (_FIXED, key)
        elif self.possible(parameters):
            state = (key, *content_of(parameters))
        else:
            self._kept = None
            return build()
        entry = self._kept
        if entry is None or entry[0] != state:
            # Outside inference mode, so that callers in and out of inference mode can use the value.
            with torch.inference_mode(mode=False), torch.no_grad():
                entry = self._kept = (state, build())
        return entry[1]

    @staticmethod
    def possible(parameters: Iterable[Tensor | None]) -> bool:
        """Whether a value of these parameters, of any shapes, would be cached now, or is fixed."""
        if _FIXED.active:
            return True
        # A recorded value must be part of the graph: of autograd, so that weights get a gradient, or of a compiler.
        if is_recorded():
            return False
        for parameter in parameters:
            # Subclasses (fake, distributed, wrapped tensors) may have no bytes of their own.
            if parameter is not None and (parameter.device.type != "cpu" or type(parameter) not in STORED):
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedWeights, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedWeights[Value]":
        return CachedWeights()


STORED = (Tensor, torch.nn.Parameter)


def content_of(parameters: Iterable[Tensor | None]) -> tuple[Hashable, ...]:
    """Returns values that are equal for equal contents and addresses of tensors of any shapes on a CPU."""
    library, numbers, facts, tensors = native_library(), [], [], []
    for parameter in parameters:
        if parameter is not None:
            tensor = parameter if parameter.is_contiguous() else parameter.detach().contiguous()
            tensors.append(tensor)  # a copy must live until its bytes are read
            numbers += (tensor.data_ptr(), tensor.nbytes)
            # The address, because a value may refer to the parameter itself.
            facts += (parameter.data_ptr(), parameter.dtype)
    if library is None:
        return (*facts, *(_projection(tensor) for tensor in tensors))
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    return (*facts, library.attnrx_content(array, len(tensors), kernel_threads()))


def _projection(tensor: Tensor) -> float:
    """Returns the product of a tensor with a fixed random vector, for machines without a compiler.

    PyTorch's own hashes of bytes take twenty times as long. A change below the rounding of the sum is not noticed.
    """
    flat = tensor.flatten()
    return float(flat @ _random_vector(1 << max(len(flat) - 1, 0).bit_length(), tensor.dtype)[: len(flat)])


@lru_cache(maxsize=8)
def _random_vector(length: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.randn(length, generator=torch.Generator().manual_seed(0)).to(dtype)
