"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.attention.attention import Attention, using
from attnrx.attention.autotune import BACKENDS, Autotuned, backend_of, use_backend
from attnrx.attention.backends.auto import Auto, Fused, Native
from attnrx.attention.backends.backend import Backend, Eager
from attnrx.attention.backends.capture import AttentionCapture, CapturedAttention, Observed, sized_softmax
from attnrx.attention.backends.explicit import Explicit
from attnrx.attention.backends.generated import Flex, Ragged
from attnrx.attention.factors import AttentionContext, Bucket, ScoreFactors
from attnrx.attention.forms import unit_rows
from attnrx.attention.positions import Positions

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
    "Positions",
    "Ragged",
    "ScoreFactors",
    "backend_of",
    "sized_softmax",
    "unit_rows",
    "use_backend",
    "using",
]
