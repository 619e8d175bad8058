"""Values that follow from parameters, built once for as long as nobody asks for gradients and nothing changes."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from attnrx.shapes import Tensor

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """One value that `build` makes from parameters, kept until one of them, or `key`, is another.

    With gradients enabled, inside torch.compile and for inference tensors, whose changes cannot be seen, it is built
    every time. A copy of the module that owns it builds its own.
    """

    def __init__(self):
        self._kept: tuple[tuple[Any, ...], Value] | None = None

    def __call__(self, key: Hashable, parameters: tuple[Tensor, ...], build: Callable[[], Value]) -> Value:
        """Gives the value, from memory where that is safe."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(part.is_inference() for part in parameters):
            return build()
        state = (key, *((part.data_ptr(), part._version, part.dtype, part.device) for part in parameters))
        kept = self._kept
        if kept is None or kept[0] != state:
            # Outside inference mode, so that the value serves both kinds of callers.
            with torch.inference_mode(mode=False), torch.no_grad():
                kept = self._kept = (state, build())
        return kept[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kept[Value]":
        return Kept()
