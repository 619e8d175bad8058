"""The default backend: the usually fastest backend by rule, without measuring."""

from collections.abc import Callable

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import NARROW, Explicit, unfused_is_faster
from attnrx.attention.backends.fused import Fused
from attnrx.attention.backends.native import Native
from attnrx.attention.context import AttentionContext
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec


def faster(
    spec: AttentionSpec,
    context: AttentionContext,
    sizes: Callable[[], Float[Tensor, "batch keys"] | None] | None = None,
    narrow: float = NARROW,
) -> Backend | None:
    """Returns a backend that is faster than PyTorch's fused kernel in this context, or None.

    `sizes` is that of `Explicit`.
    """
    if Native.runs(spec, context):
        return Native(sizes)
    return Explicit(sizes) if unfused_is_faster(spec, context, narrow) else None


class Auto(Fused):
    """Inference on a CPU: the C++ kernel (`Native`), or unfused attention for narrow heads; otherwise the fused
    kernel."""

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns the backend for this layer and context."""
        return faster(spec, context) or Fused()
