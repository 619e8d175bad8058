"""Checks of the laboratory: accuracy on corrupted images, transfer to another dataset, and the theorems of SVDA."""

from attnrx_lab.checks.bounds import Bounds
from attnrx_lab.checks.robustness import Robustness
from attnrx_lab.checks.transfer import Transfer

__all__ = ["Bounds", "Robustness", "Transfer"]
