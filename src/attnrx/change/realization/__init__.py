"""Applies prescriptions (pruning plans): makes a smaller or a masked copy of a model, and fits its weights."""

from attnrx.change.realization.realizing import (
    compressed_spec,
    prescribed_tokens,
    realize,
    realize_and_fit,
    realize_tokens_,
)

__all__ = ["compressed_spec", "prescribed_tokens", "realize", "realize_and_fit", "realize_tokens_"]
