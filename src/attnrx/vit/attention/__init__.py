"""Attention layers in which every head may have its own rank, and the backends that compute them."""

from attnrx.vit.attention.attention import BACKENDS, Attention, backend_of, use_backend, using
from attnrx.vit.attention.backends import (
    AttentionCapture,
    AttentionContext,
    Auto,
    Backend,
    Bucket,
    CapturedAttention,
    Eager,
    Fused,
    Native,
    Observation,
    Observed,
    Portable,
    ScoreFactors,
    capture_uniform,
    sized_softmax,
)
from attnrx.vit.attention.forms import Positions

__all__ = [
    "BACKENDS", "Attention", "AttentionCapture", "AttentionContext", "Auto", "Backend", "Bucket", "CapturedAttention",
    "Eager", "Fused", "Native", "Observation", "Observed", "Portable", "Positions", "ScoreFactors", "backend_of",
    "capture_uniform", "sized_softmax", "use_backend", "using",
]  # fmt: skip
