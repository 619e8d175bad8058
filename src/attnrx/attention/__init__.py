"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.attention.attention import Attention, using
from attnrx.attention.backends import Backend, Eager, Fused, Observation, Observed
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.spec import AttentionSpec
from attnrx.attention.unit_rows import unit_rows

__all__ = [
    "Attention",
    "AttentionSpec",
    "Backend",
    "Bucket",
    "Eager",
    "Fused",
    "Observation",
    "Observed",
    "ScoreFactors",
    "unit_rows",
    "using",
]
