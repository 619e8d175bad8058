"""Converts models to attnrx's kernels for inference (`accelerate`), and back (`plain`).

An accelerated model cannot be trained, and its weights cannot be changed. So values that attnrx computes once from the
weights always stay valid. The class of an accelerated model is a subclass of the user's class.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, fx, nn

from attnrx.support.arguments import checked
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import copy_module
from attnrx.vit.models.boundary.working_copy import HOOKS, WORKING, hook_keys, library_form, plain_form, working_copy
from attnrx.vit.models.families import family_of
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.models.working.adopted import chunked_forward


class Accelerated(nn.Module):
    """Base class of accelerated models, which refuses training. The user's class is the second base class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the original model. If you pass only images, they are processed in cache-sized chunks.

        Raises:
            NotSupported: torch.fx traces the model.
        """
        given: Any = args  # torch.fx traces `*args` as one value
        if isinstance(given, fx.Proxy):
            raise NotSupported(
                "torch.fx traces no accelerated model, whose kernels are chosen by the shapes of the images: trace "
                "attnrx.plain(model), which computes the same."
            )
        working, original = vars(self)[WORKING], super().forward
        family, config = family_of(self), getattr(self, "config", None)
        wants_all = kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False))
        blocks = range(len(family.block_names(self))) if wants_all else family.restored_blocks(self) or ()

        def run(*given: Any) -> Any:
            with working.forward_pass(blocks):
                return original(*given, **kwargs)

        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].ndim != 4:
            return run(*args)
        return chunked_forward(working, run, args[0], working._max_elements(args[0]))

    def train(self, mode: bool = True) -> Any:
        """Keeps the model in evaluation mode.

        Raises:
            NotSupported: `mode` is True.
        """
        if mode:
            raise NotSupported(FROZEN)
        return super().train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Keeps the weights without gradients.

        Raises:
            NotSupported: `requires_grad` is True.
        """
        if requires_grad:
            raise NotSupported(FROZEN)
        return super().requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights under the original model's names."""
        return library_form(vars(self)[WORKING]).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Refuses new weights, because an accelerated model is frozen.

        Raises:
            NotSupported: Always.
        """
        raise NotSupported(FROZEN)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter):
            raise NotSupported(f"{name}: {FROZEN}")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty, (type(self).__bases__[1],), self.__getstate__()


FROZEN = (
    "an accelerated model is for inference, and its weights do not change: take attnrx.plain(model), train or change "
    "that, and accelerate the result."
)


@checked()
def accelerate(model: nn.Module) -> nn.Module:
    """Returns a copy of a model for inference on a CPU, which computes the same outputs with attnrx's kernels.

    In float32, one C++ kernel call computes a whole attention layer, MLP or block, if the kernel supports this kind of
    module. Batches are processed in chunks that fit the processor's caches. If the model's output needs only the class
    token, the last block computes only this token. The copy has your model's class, call signature and state dict. You
    cannot train the copy or load new weights into it. To get your model back, call `plain`.

    Args:
        model: A model that attnrx returned, e.g. from `load` or `realize`.

    Returns:
        The accelerated copy, in evaluation mode and without gradients.

    Raises:
        InvalidInput: The model is already accelerated, or was not loaded by attnrx.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> fast = rx.accelerate(rx.load(vit))
        >>> bool((fast(torch.ones(1, 3, 32, 32)) - vit.eval()(torch.ones(1, 3, 32, 32))).abs().max() < 1e-4)
        True
    """
    if is_accelerated(model):
        raise InvalidInput(f"this {type(model).__name__} is accelerated already.")
    if record_of(model) is None:
        raise InvalidInput(
            f"this {type(model).__name__} was not loaded by attnrx: accelerate the result of attnrx.load(model). "
            "Models of attnrx's own layers need no acceleration."
        )
    working: Any = working_copy(copy_module(model)).eval()
    root: nn.Module = working.source
    root.requires_grad_(False)
    root.__class__ = _accelerated(type(root))
    vars(root)[WORKING] = working
    vars(working)[HOOKS] = hook_keys(root)
    return root


@checked()
def plain(model: nn.Module) -> nn.Module:
    """Returns a copy of an accelerated model with its original class, modules and weights.

    Args:
        model: A model that `accelerate` returned.

    Returns:
        The copy, in evaluation mode. You can train its weights.

    Raises:
        InvalidInput: The model is not accelerated.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> type(rx.plain(rx.accelerate(rx.load(vit)))) is type(vit)
        True
    """
    if not is_accelerated(model):
        raise InvalidInput(f"this {type(model).__name__} is not accelerated, so it is plain already.")
    return copy_module(plain_form(model))


def is_accelerated(model: nn.Module) -> bool:
    """Returns whether a model is accelerated."""
    return isinstance(model, Accelerated)


@lru_cache
def _accelerated(kind: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Accelerated, kind), names)


def _empty(kind: type[nn.Module]) -> nn.Module:
    """Creates an accelerated model without attributes. Pickle calls this function and then restores the attributes."""
    made = _accelerated(kind)
    return made.__new__(made)
