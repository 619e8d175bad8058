"""The backend that every layer begins with: what is usually fastest, by rule, without measuring."""

from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.explicit import Explicit, worth_writing_out
from attnrx.attention.backends.fused import Fused
from attnrx.attention.backends.native import Native
from attnrx.attention.occasion import Occasion
from attnrx.spec import AttentionSpec


class Auto(Fused):
    """For inference on a CPU the kernel of our own (`Native`), else narrow attention written out; else fused."""

    def at(self, spec: AttentionSpec, occasion: Occasion) -> Backend:
        """Gives the backend for this layer and occasion."""
        if Native.runs(spec, occasion):
            return Native()
        return Explicit() if worth_writing_out(spec, occasion) else Fused()
