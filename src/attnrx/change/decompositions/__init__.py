"""Matrix and tensor decompositions: functions of tensors, independent of attention."""

from attnrx.change.decompositions.allocation import allocate_by_loss, water_fill
from attnrx.change.decompositions.balanced import Balanced, balance, factor_directions, read_out, svd_directions
from attnrx.change.decompositions.block_term import (
    BlockTerms,
    Fusion,
    block_terms,
    deflate,
    fusion_ranks,
    initial_blocks,
    nonnegative_units,
    ownership_penalty,
)
from attnrx.change.decompositions.canonical import (
    Canonical,
    als,
    cpd_epc,
    epc,
    least_sensitivity,
    water_filled,
)
from attnrx.change.decompositions.factored import FactoredTensor
from attnrx.change.decompositions.hidden_units import compensated, unit_losses
from attnrx.change.decompositions.least_squares import StrengthFit, elimination_losses
from attnrx.change.decompositions.low_rank import (
    LowRank,
    activation_aware,
    break_even_rank,
    output_pca,
    pays,
    plain_svd,
)

__all__ = [
    "Balanced",
    "BlockTerms",
    "Canonical",
    "FactoredTensor",
    "Fusion",
    "LowRank",
    "StrengthFit",
    "activation_aware",
    "allocate_by_loss",
    "als",
    "balance",
    "block_terms",
    "break_even_rank",
    "compensated",
    "cpd_epc",
    "deflate",
    "elimination_losses",
    "epc",
    "factor_directions",
    "fusion_ranks",
    "initial_blocks",
    "least_sensitivity",
    "nonnegative_units",
    "output_pca",
    "ownership_penalty",
    "pays",
    "plain_svd",
    "read_out",
    "svd_directions",
    "unit_losses",
    "water_fill",
    "water_filled",
]
