"""Checks for research: matched controls, accuracy on corrupted images, transfer, and the SVDA paper's theorems."""

from attnrx.show.checks import CHECKS
from attnrx_lab.checks.bounds import Bounds
from attnrx_lab.checks.controls import Controls
from attnrx_lab.checks.robustness import Robustness
from attnrx_lab.checks.transfer import Transfer

__all__ = ["Bounds", "Controls", "Robustness", "Transfer"]

for _kind in (Controls, Robustness, Transfer):
    CHECKS.register(_kind)
