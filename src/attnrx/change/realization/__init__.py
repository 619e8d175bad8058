"""Realizes prescriptions: a smaller copy of a model, or a masked one, and fits of its weights."""

from attnrx.change.realization.attention_layers import compressed_spec
from attnrx.change.realization.fits import realize_and_fit
from attnrx.change.realization.realizing import prescribed_tokens, realize, realize_tokens_

__all__ = ["compressed_spec", "prescribed_tokens", "realize", "realize_and_fit", "realize_tokens_"]
