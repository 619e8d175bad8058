"""The sensitivity of a canonical decomposition, from its definition."""

from attnrx_lab.decompositions import Canonical


def term_sensitivity(terms: Canonical) -> float:
    """sum_r (K |a|^2 |b|^2 + J |a|^2 |c|^2 + I |b|^2 |c|^2), of the terms as they are scaled."""
    left, right, mix = (factor.square().sum(0) for factor in terms.factors)
    rows, columns, slices = (factor.shape[0] for factor in terms.factors)
    return float((slices * left * right + columns * left * mix + rows * right * mix).sum())
