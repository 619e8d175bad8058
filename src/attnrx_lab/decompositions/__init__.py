"""Decompositions of the query-key tensor of a layer into terms that its heads share (IrrAtt)."""

from attnrx_lab.decompositions.block_term import (
    BlockTerms,
    Fusion,
    block_terms,
    deflate,
    fusion_ranks,
    initial_blocks,
    nonnegative_units,
    ownership_penalty,
)
from attnrx_lab.decompositions.canonical import Canonical, als, cpd_epc, epc, least_sensitivity, water_filled
from attnrx_lab.decompositions.factored import FactoredTensor

__all__ = [
    "BlockTerms",
    "Canonical",
    "FactoredTensor",
    "Fusion",
    "als",
    "block_terms",
    "cpd_epc",
    "deflate",
    "epc",
    "fusion_ranks",
    "initial_blocks",
    "least_sensitivity",
    "nonnegative_units",
    "ownership_penalty",
    "water_filled",
]
