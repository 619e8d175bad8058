"""Costs as papers count them: compressed forms by name, before anything is computed, and the operations of IrrAtt."""

from attnrx_lab.costs.compressed_shapes import Compression
from attnrx_lab.costs.conventions import NORM_MACS, Price, priced

__all__ = ["NORM_MACS", "Compression", "Price", "priced"]
