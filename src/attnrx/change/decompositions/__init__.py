"""Decompositions of matrices: functions of tensors, independent of attention."""

from attnrx.change.decompositions.allocation import water_fill
from attnrx.change.decompositions.balanced import Balanced, balance, factor_directions, read_out, svd_directions
from attnrx.change.decompositions.elimination import compensated, elimination_losses, unit_losses
from attnrx.change.decompositions.low_rank import activation_aware, break_even_rank, output_pca, pays, plain_svd

__all__ = [
    "Balanced", "activation_aware", "balance", "break_even_rank", "compensated", "elimination_losses",
    "factor_directions", "output_pca", "pays", "plain_svd", "read_out", "svd_directions", "unit_losses", "water_fill",
]  # fmt: skip
