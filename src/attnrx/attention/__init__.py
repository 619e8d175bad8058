"""Attention of any form, with irregular ranks, executed by interchangeable backends."""

from attnrx.attention.attention import Attention, using
from attnrx.attention.backends import (
    Auto,
    Backend,
    Eager,
    Explicit,
    Flex,
    Fused,
    Native,
    Observed,
    Ragged,
    Tap,
    Tapped,
    sized_softmax,
)
from attnrx.attention.choosing import BACKENDS, Chosen, backend_of
from attnrx.attention.factors import Bucket, ScoreFactors
from attnrx.attention.occasion import Occasion
from attnrx.attention.unit_rows import unit_rows

__all__ = [
    "BACKENDS",
    "Attention",
    "Auto",
    "Backend",
    "Bucket",
    "Chosen",
    "Eager",
    "Explicit",
    "Flex",
    "Fused",
    "Native",
    "Observed",
    "Occasion",
    "Ragged",
    "ScoreFactors",
    "Tap",
    "Tapped",
    "backend_of",
    "sized_softmax",
    "unit_rows",
    "using",
]
