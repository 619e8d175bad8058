"""Tensors in, factors out: nothing here knows of attention."""

from attnrx.decompositions.strength_fit import StrengthFit

__all__ = ["StrengthFit"]
