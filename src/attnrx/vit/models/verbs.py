"""The boundary of a public function that works on models: what it requires of them, and what it leaves unchanged."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from attnrx.support.hardware import restored_random_states
from attnrx.vit.models.adopted import Adopted
from attnrx.vit.models.adoption_proof import require_plain_code, require_unchanged
from attnrx.vit.models.families import OWN

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def verb(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a function on models a verb: it checks the code that was added to them, runs in the ordinary modes of
    autograd whatever the caller's are, and leaves the state of models and random generators as it was.

    Raises:
        NotSupported: Hooks, a replaced `forward` or reparametrized weights change a model.
    """

    @wraps(function)
    def bounded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        models = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        with ordinary_modes(), restored_state(models):
            for model in models:
                if isinstance(model, Adopted) or any(family.matches(model) for family in OWN):
                    require_plain_code(model)
                    require_unchanged(model, model, model.origin.input_shape)  # type: ignore[union-attr, arg-type]
            return function(*args, **kwargs)

    return bounded


@contextmanager
def ordinary_modes() -> Iterator[None]:
    """Leaves inference mode and autocast inside the context, and enables gradients."""
    # Weights made in inference mode cannot be trained, and autocast would change what is measured.
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def restored_state(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restores modes of parts, `requires_grad` and `grad`, and the random states of torch, numpy and `random`."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    gradients = [(weight, weight.requires_grad, weight.grad) for model in models for weight in model.parameters()]
    try:
        with restored_random_states():
            yield
    finally:
        for part, training in modes:
            part.training = training
        for weight, requires_grad, gradient in gradients:
            if weight.requires_grad != requires_grad:
                weight.requires_grad_(requires_grad)
            if weight.grad is not gradient:
                weight.grad = gradient
