"""Backends: `Eager` is the reference; the others equal it to rounding."""

from attnrx.attention.backends.auto import Auto
from attnrx.attention.backends.backend import Backend
from attnrx.attention.backends.capture import AttentionCapture, CapturedAttention, sized_softmax
from attnrx.attention.backends.eager import Eager, scores
from attnrx.attention.backends.explicit import Explicit, unfused
from attnrx.attention.backends.flex import Flex
from attnrx.attention.backends.fused import Fused
from attnrx.attention.backends.native import Native
from attnrx.attention.backends.observed import Observed
from attnrx.attention.backends.ragged import Ragged

__all__ = [
    "AttentionCapture",
    "Auto",
    "Backend",
    "CapturedAttention",
    "Eager",
    "Explicit",
    "Flex",
    "Fused",
    "Native",
    "Observed",
    "Ragged",
    "scores",
    "sized_softmax",
    "unfused",
]
