"""Backends: `Eager` is the truth, the others equal it to rounding."""

from attnrx.attention.backends.auto import Auto
from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.eager import Eager, scores
from attnrx.attention.backends.explicit import Explicit, written_out
from attnrx.attention.backends.flex import Flex
from attnrx.attention.backends.fused import Fused
from attnrx.attention.backends.native import Native
from attnrx.attention.backends.observed import Observed
from attnrx.attention.backends.ragged import Ragged
from attnrx.attention.backends.tapped import Tap, Tapped, sized_softmax

__all__ = [
    "Auto",
    "Backend",
    "Eager",
    "Explicit",
    "Flex",
    "Fused",
    "Native",
    "Observed",
    "Ragged",
    "Tap",
    "Tapped",
    "scores",
    "sized_softmax",
    "written_out",
]
