"""Values that follow from parameters, computed once while no gradients are needed and no parameter changes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from attnrx.shapes import Tensor

Value = TypeVar("Value")


class _Steps:
    """The steps that all optimizers of this process have made."""

    def __init__(self):
        self.count = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: object) -> None:
        self.count += 1


_steps = _Steps()


class CachedWeights(Generic[Value]):
    """One value that `build` makes from parameters, kept until one of them, or `key`, is another.

    With gradients enabled, inside torch.compile and for inference tensors, whose changes cannot be seen, it is built
    every time. Nor can those of fused optimizers be seen, which do not count a tensor's versions: a value is not kept
    over the step of any optimizer, nor over a pass with gradients. A copy of the module that owns it builds its own.
    """

    def __init__(self):
        self._kept: tuple[list[object], Value] | None = None

    def __call__(self, key: Hashable, parameters: Sequence[Tensor | None], build: Callable[[], Value]) -> Value:
        """Returns the value, from memory where that is safe; a parameter may be absent."""
        if not self.possible(parameters):
            self._kept = None
            return build()
        state: list[object] = [key, _steps.count]
        for part in parameters:
            if part is not None:
                state += (part.data_ptr(), part._version, part.dtype, part.device)
        kept = self._kept
        if kept is None or kept[0] != state:
            # Outside inference mode, so that the value serves both kinds of callers.
            with torch.inference_mode(mode=False), torch.no_grad():
                kept = self._kept = (state, build())
        return kept[1]

    @staticmethod
    def possible(parameters: Iterable[Tensor | None]) -> bool:
        """Whether a value would be kept now."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        for part in parameters:
            if part is not None and part.is_inference():
                return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedWeights[Value]":
        return CachedWeights()
