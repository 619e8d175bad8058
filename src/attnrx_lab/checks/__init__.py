"""Checks of the laboratory: accuracy on corrupted images, and transfer to another dataset."""

from attnrx_lab.checks.robustness import Robustness
from attnrx_lab.checks.transfer import Transfer

__all__ = ["Robustness", "Transfer"]
