"""Selects the backend that computes the attention of a model."""

from torch import nn

from attnrx.attention import Attention, Backend, backend_of
from attnrx.errors import NotSupported


def use_backend(model: nn.Module, backend: str | Backend) -> nn.Module:
    """Sets the backend of every layer of the model, in place, and returns the model.

    Names: "auto" (the default of new models: "native" for float32 inference on a CPU, else the usually fastest one),
    "eager" (the reference), "explicit", "flex", "fused", "native", "ragged", or "autotuned", which measures. Layers
    whose attention is captured for a token reducer keep their backend. The choice is not saved with the model, because
    the fastest backend depends on the machine.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The model has no attnrx attention, every layer's attention is captured for a token reducer, or the
            kernel of "native" could not be built.
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    free = [layer for layer in layers if not layer.backend.watches]
    if not free:
        found = "every layer's attention is captured for a token reducer" if layers else "it has no attention of attnrx"
        raise NotSupported(f"no layer of this {type(model).__name__} can take another backend: {found}.")
    new_backend = backend_of(backend) if isinstance(backend, str) else backend
    for layer in free:
        layer.backend = new_backend
    return model
