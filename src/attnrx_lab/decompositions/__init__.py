"""Decompositions of a layer's query-key tensor into terms that the layer's heads share (IrrAtt)."""

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
from attnrx_lab.decompositions.tucker import Tucker, hosvd, tucker_terms

__all__ = [
    "BlockTerms",
    "Canonical",
    "FactoredTensor",
    "Fusion",
    "Tucker",
    "als",
    "block_terms",
    "cpd_epc",
    "deflate",
    "epc",
    "fusion_ranks",
    "hosvd",
    "initial_blocks",
    "least_sensitivity",
    "nonnegative_units",
    "ownership_penalty",
    "tucker_terms",
    "water_filled",
]
