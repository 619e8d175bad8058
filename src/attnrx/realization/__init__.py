"""Realizes prescriptions: the only package that changes a model."""

from attnrx.realization.directions import compressed_spec
from attnrx.realization.fitting import refitted
from attnrx.realization.realizing import (
    calibrated,
    prescribed_tokens,
    realize,
    realize_fitted,
    realize_tokens_,
)

__all__ = [
    "calibrated",
    "compressed_spec",
    "prescribed_tokens",
    "realize",
    "realize_fitted",
    "realize_tokens_",
    "refitted",
]
