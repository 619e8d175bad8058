"""Checks and converts the models passed to attnrx's public functions ("verbs"), and restores the caller's state."""

import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from attnrx.support.arguments import described_error
from attnrx.support.errors import AttnrxError, UserCodeError, is_out_of_memory
from attnrx.support.hardware import restored_random_states
from attnrx.support.modules import copy_module, require_gradient_
from attnrx.vit.models.boundary.working_copy import library_form, require_alike, working_copy
from attnrx.vit.models.families import known_family
from attnrx.vit.models.family import NamedFamily
from attnrx.vit.models.observation_hooks import without_autocast
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.models.working.adoption_proof import require_plain_code, require_unchanged

CHANGED = (
    "was changed after attnrx.load in a way that attnrx does not read. Make the change in the model that you give to "
    "attnrx.load, or undo it."
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def verb(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a public function on models (a "verb") check its models first, and restore the caller's state afterwards.

    The decorated function gets attnrx's working copies of the models. Models are refused if hooks or other added code
    change their outputs. The function runs with gradients enabled and without autocast, whatever modes the caller set.
    New tensors are created on the CPU by default. When the function ends, the models' modes and gradients and the
    states of the random generators are restored.

    Raises:
        NotSupported: A hook, a replaced `forward` or a reparametrized weight changes a model's outputs.
    """

    @wraps(function)
    def bounded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        models = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        is_inside = _IS_INSIDE.get()
        with ordinary_modes(), default_cpu(), restored_state(models), inside_verb():
            copies: dict[int, nn.Module] = {}
            for model in {id(each): each for each in models}.values():  # a model that is passed twice has one copy
                copies[id(model)] = working_copy(model)
                if not is_inside and record_of(model) is not None:
                    require_alike(model, copies[id(model)], CHANGED)
            for model in copies.values():
                is_plain = isinstance(model, Adopted) and model.around is None
                if is_plain or isinstance(known_family(model), NamedFamily):
                    require_plain_code(model)
                    require_unchanged(model, model, model.origin.input_shape)  # type: ignore[union-attr, arg-type]
            given = [copies.get(id(value), value) for value in args]
            named = {name: copies.get(id(value), value) for name, value in kwargs.items()}
            with nullcontext() if is_inside else users_code_named(function.__name__):
                result = function(*given, **named)  # type: ignore[call-arg]
            return result if is_inside else returned(result, models)

    return bounded


@contextmanager
def users_code_named(verb: str) -> Iterator[None]:
    """Converts an exception in the user's code into UserCodeError, which names the function, file and line.

    User code is code outside of installed packages that attnrx called, for example a module's `forward`. An exception
    from library code that attnrx called directly is raised unchanged, because it indicates a bug in attnrx.

    Raises:
        UserCodeError: User code inside the context raised an exception. The exception is the `__cause__`.
    """
    try:
        yield
    except AttnrxError:
        raise
    except (Exception, SystemExit) as error:
        files = [(each.filename, each.lineno, each.name) for each in traceback.extract_tb(error.__traceback__)]
        last = max((index for index, (file, *_) in enumerate(files) if file.startswith(PACKAGE)), default=-1)
        users = [each for each in files[last + 1 :] if not each[0].startswith(INSTALLED) and Path(each[0]).is_file()]
        if not users or is_out_of_memory(error):
            raise
        file, line, name = users[-1]
        raise UserCodeError(
            f"{verb} ran {name} of your code ({Path(file).name}, line {line}), which raised {type(error).__name__}: "
            f"{described_error(error)}"
        ) from error


# The folder with attnrx's code, and the folders with Python and its packages.
PACKAGE = str(Path(__file__).parents[3])
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@contextmanager
def default_cpu() -> Iterator[None]:
    """Creates new tensors inside the context on the CPU, even if the caller set another default device."""
    # The mode costs time in every operation, so it is set only if the default device differs.
    with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
        yield


_IS_INSIDE: ContextVar[bool] = ContextVar("inside a verb", default=False)


@contextmanager
def inside_verb() -> Iterator[None]:
    """Makes public functions that are called in this context return working copies."""
    token = _IS_INSIDE.set(True)
    try:
        yield
    finally:
        _IS_INSIDE.reset(token)


def returned(result: Any, given: Sequence[nn.Module] = ()) -> Any:
    """Converts the working copies in a public function's result back to models of the user's classes.

    If a converted model shares weights with a model in `given`, e.g. because nothing changed, a copy is returned.
    """
    if hasattr(result, "in_library_form"):
        result = result.in_library_form()
    if isinstance(result, nn.Module):
        return _with_own_memory(library_form(result), given)
    model = getattr(result, "model", None)
    if is_dataclass(result) and isinstance(model, nn.Module):
        return replace(result, model=_with_own_memory(library_form(model), given))  # type: ignore[type-var, call-arg]
    return result


def _with_own_memory(model: nn.Module, given: Sequence[nn.Module]) -> nn.Module:
    if record_of(model) is None or any(each is model for each in given):
        return model
    addresses = {weight.data_ptr() for each in given for weight in each.parameters() if weight.numel()}
    shares = any(weight.data_ptr() in addresses for weight in model.parameters() if weight.numel())
    return copy_module(model) if shares else model


@contextmanager
def ordinary_modes() -> Iterator[None]:
    """Turns off inference mode and autocast inside the context, and enables gradients."""
    # Weights that are created in inference mode cannot be trained. Autocast would change measured values.
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(without_autocast())
        yield


@contextmanager
def restored_state(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restores training modes, gradients, and the random states of torch, numpy and `random` when the context ends.

    For the gradients, `requires_grad` and `grad` of every weight are restored.
    """
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
                require_gradient_(weight, requires_grad)
            if weight.grad is not gradient:
                weight.grad = gradient
