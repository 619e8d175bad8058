"""Counts costs by the conventions of the IrrAtt, SPOT and SVDA papers, to reproduce their printed numbers."""

from attnrx_lab.costs.compressed_shapes import Compression
from attnrx_lab.costs.conventions import (
    NORM_MACS,
    Price,
    direction_costs,
    layer_norm_features,
    outer_norm_features,
    predictor_norm_features,
    priced,
    saved_shares,
)

__all__ = [
    "NORM_MACS",
    "Compression",
    "Price",
    "direction_costs",
    "layer_norm_features",
    "outer_norm_features",
    "predictor_norm_features",
    "priced",
    "saved_shares",
]
