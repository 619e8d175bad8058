"""Applies prescriptions (pruning plans): makes a smaller or masked copy of a model, and fits the copy's weights."""

from attnrx.change.realization.realizing import (
    compressed_spec,
    prescribed_tokens,
    realize,
    realize_and_fit,
    realize_tokens_,
)

__all__ = ["compressed_spec", "prescribed_tokens", "realize", "realize_and_fit", "realize_tokens_"]
