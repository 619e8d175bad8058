"""Realizes prescriptions: a smaller copy of a model, or a masked one, and fits of its weights."""

from attnrx.change.realization.realizing import (
    compressed_spec,
    prescribed_tokens,
    realize,
    realize_and_fit,
    realize_tokens_,
)

__all__ = ["compressed_spec", "prescribed_tokens", "realize", "realize_and_fit", "realize_tokens_"]
