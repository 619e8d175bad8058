"""The backend that every layer begins with: what is usually fastest, by rule, without measuring."""

from collections.abc import Callable

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import NARROW, Explicit, worth_writing_out
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
    """Returns what is faster than PyTorch's fused kernel in this context, if anything is; `sizes` as `Explicit`'s."""
    if Native.runs(spec, context):
        return Native(sizes)
    return Explicit(sizes) if worth_writing_out(spec, context, narrow) else None


class Auto(Fused):
    """For inference on a CPU the kernel of our own (`Native`), else narrow attention written out; else fused."""

    def at(self, spec: AttentionSpec, context: AttentionContext) -> Backend:
        """Returns the backend for this layer and context."""
        return faster(spec, context) or Fused()
