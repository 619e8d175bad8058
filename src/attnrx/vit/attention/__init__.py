"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.vit.attention.attention import BACKENDS, Attention, backend_of, use_backend, using
from attnrx.vit.attention.backends.auto import Auto, Fused, Native, Portable
from attnrx.vit.attention.backends.backend import Backend, Eager
from attnrx.vit.attention.backends.capture import (
    AttentionCapture,
    CapturedAttention,
    Observed,
    capture_uniform,
    sized_softmax,
)
from attnrx.vit.attention.factors import AttentionContext, Bucket, ScoreFactors
from attnrx.vit.attention.positions import Positions

__all__ = [
    "BACKENDS", "Attention", "AttentionCapture", "AttentionContext", "Auto", "Backend", "Bucket", "CapturedAttention",
    "Eager", "Fused", "Native", "Observed", "Portable", "Positions", "ScoreFactors", "backend_of", "capture_uniform",
    "sized_softmax", "use_backend", "using",
]  # fmt: skip
