"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.attention.attention import Attention, using
from attnrx.attention.backends import Backend, Eager, Explicit, Fused, Observed, Tap, Tapped, sized_softmax
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.occasion import Occasion
from attnrx.attention.unit_rows import unit_rows

__all__ = [
    "Attention",
    "Backend",
    "Bucket",
    "Eager",
    "Explicit",
    "Fused",
    "Observed",
    "Occasion",
    "ScoreFactors",
    "Tap",
    "Tapped",
    "sized_softmax",
    "unit_rows",
    "using",
]
