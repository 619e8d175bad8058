"""Which backend computes the attention of a model."""

from torch import nn

from attnrx.attention import Attention, Backend, backend_of
from attnrx.errors import NotSupported


def use_backend(model: nn.Module, backend: str | Backend) -> nn.Module:
    """Lets a backend compute every layer of the model, in place, and returns the model.

    By name: "auto" (as models are made: "native" for inference in float32 on a CPU, else what is usually fastest),
    "eager" (the truth), "explicit", "flex", "fused", "native", "ragged", or "chosen", which measures. Layers that show
    their attention to a token reducer keep the backend that does so. It is not saved with the model: what is fastest
    depends on the machine.

    Raises:
        UnknownName: No backend has this name.
        NotSupported: The model has no attention of ours, every layer shows its attention to a token reducer, or the
            kernel of "native" could not be built here.
    """
    layers = [part for part in model.modules() if isinstance(part, Attention)]
    free = [layer for layer in layers if not layer.backend.watches]
    if not free:
        found = "every layer shows its attention to a token reducer" if layers else "it has no attention of attnrx"
        raise NotSupported(f"no layer of this {type(model).__name__} can take another backend: {found}.")
    made = backend_of(backend) if isinstance(backend, str) else backend
    for layer in free:
        layer.backend = made
    return model
