"""Values derived from parameters, cached while no gradients are needed and no parameter changes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from attnrx.runtime.recording import is_recorded
from attnrx.shapes import Tensor

Value = TypeVar("Value")


class CachedWeights(Generic[Value]):
    """A value that `build` computes from parameters, cached until one of them, or `key`, changes.

    With gradients enabled, inside torch.compile and for inference tensors, whose changes cannot be detected, it is
    computed every time. Fused optimizers do not increase a tensor's version either, so the cache is dropped at the step
    of any optimizer and after a pass with gradients. A copy of the owning module, or a pickled one, has its own cache.
    """

    steps = 0
    """The steps of all optimizers in this process so far."""

    def __init__(self):
        self._kept: tuple[list[object], Value] | None = None

    def __call__(self, key: Hashable, parameters: Sequence[Tensor | None], build: Callable[[], Value]) -> Value:
        """Returns the value, from the cache if that is safe; a parameter may be None."""
        if not self.possible(parameters):
            self._kept = None
            return build()
        state: list[object] = [key, CachedWeights.steps]
        for parameter in parameters:
            if parameter is not None:
                # The version counts changes in place; a new storage (`.to()`, an assigned parameter) has a new address.
                state += (parameter.data_ptr(), parameter._version, parameter.dtype, parameter.device)
        entry = self._kept
        if entry is None or entry[0] != state:
            # Outside inference mode, so that callers in and out of inference mode can use the value.
            with torch.inference_mode(mode=False), torch.no_grad():
                entry = self._kept = (state, build())
        return entry[1]

    @staticmethod
    def possible(parameters: Iterable[Tensor | None]) -> bool:
        """Whether a value would be cached now."""
        # A recorded value must be part of the graph: of autograd, so that weights get a gradient, or of a compiler.
        if is_recorded():
            return False
        for parameter in parameters:
            if parameter is not None and parameter.is_inference():  # it has no version counter
                return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedWeights, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedWeights[Value]":
        return CachedWeights()


def _count_step(*_: object) -> None:
    CachedWeights.steps += 1


# A global hook: a layer cannot find out which optimizer has its parameters.
register_optimizer_step_post_hook(_count_step)
