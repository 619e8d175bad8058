"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.attention.attention import Attention, using
from attnrx.attention.autotune import BACKENDS, Autotuned, backend_of, use_backend
from attnrx.attention.backends import (
    AttentionCapture,
    Auto,
    Backend,
    CapturedAttention,
    Eager,
    Explicit,
    Flex,
    Fused,
    Native,
    Observed,
    Ragged,
    sized_softmax,
)
from attnrx.attention.context import AttentionContext
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.unit_rows import unit_rows

__all__ = [
    "BACKENDS",
    "Attention",
    "AttentionCapture",
    "AttentionContext",
    "Auto",
    "Autotuned",
    "Backend",
    "Bucket",
    "CapturedAttention",
    "Eager",
    "Explicit",
    "Flex",
    "Fused",
    "Native",
    "Observed",
    "Ragged",
    "ScoreFactors",
    "backend_of",
    "sized_softmax",
    "unit_rows",
    "use_backend",
    "using",
]
