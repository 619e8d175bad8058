"""Backends by name, and the choice of one for all layers of a model."""

from collections.abc import Callable

from torch import nn

from attnrx.support.arguments import checked, instance
from attnrx.support.errors import NotSupported, UnknownName
from attnrx.vit.attention.attention import Attention
from attnrx.vit.attention.backends.auto import Auto, Fused, Native
from attnrx.vit.attention.backends.backend import Backend, Eager
from attnrx.vit.attention.backends.capture import AttentionCapture, Observed
from attnrx.vit.kernels.compilation import required_library

BACKENDS: dict[str, Callable[[], Backend]] = {"auto": Auto, "eager": Eager, "fused": Fused, "native": Native}
"""Factories of the backends by name."""


def backend_of(name: str) -> Backend:
    """Returns the backend of this name, one of BACKENDS.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: Its kernel cannot be built here.
    """
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    if name == "native":
        # `Native` would run `Fused` in its place; a backend that is requested by name must not be replaced silently.
        required_library()
    return BACKENDS[name]()


@checked(backend=instance("the name of a backend, e.g. 'auto', or a Backend", str, Backend))
def use_backend(model: nn.Module, backend: str | Backend) -> nn.Module:
    """Sets the backend of every layer of the model, in place, and returns the model.

    Names: "auto" (the default of new models: "native" for float32 inference on a CPU, else the usually fastest one),
    "eager" (the reference), "fused" or "native". Layers whose attention is captured for a token reducer
    keep their backend. The choice is not saved with the model, because the fastest backend depends on the machine.

    Args:
        model: The model.
        backend: The name of a backend, or a backend.

    Returns:
        The model.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The kernel of "native" could not be built, the model has no attnrx attention, or every layer's
            attention is captured for a token reducer.

    Examples:
        >>> model = rx.use_backend(rx.load("svda:digits"), "eager")  # the reference
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    free = [layer for layer in layers if not isinstance(layer.backend, AttentionCapture | Observed)]
    if not free:
        cause = "every layer's attention is captured for a token reducer" if layers else "it has no attention of attnrx"
        raise NotSupported(f"no layer of this {type(model).__name__} can take another backend: {cause}.")
    new_backend = backend_of(backend) if isinstance(backend, str) else backend
    for layer in free:
        layer.backend = new_backend
    return model
