"""The error-preserving correction of a canonical decomposition (CPD-EPC): less cancellation at the same error."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnrx.decompositions.canonical import (
    Canonical,
    als,
    error_of,
    least_sensitivity,
)
from attnrx.decompositions.factored import FactoredTensor
from attnrx.shapes import Float, Tensor

# The smallest relative error that can be a bound: its square must exceed the rounding of || Y ||^2.
SMALLEST_BOUND = 1e-6
_MARGIN = 64 * torch.finfo(torch.float64).eps
# Eigenvalues of a normal matrix below this share of the largest one are rounding.
_NULL = 1e-14
_STEPS = 60  # each halves an interval: enough for all digits of float64
_TOLERANCE = 1e-6  # a correction stops when a sweep lowers the sensitivity by less than this share


@dataclass(frozen=True)
class CorrectionSchedule:
    """The options of CPD-EPC: alternating least squares, a correction, and least squares from the corrected terms.

    `sweeps` are those of each least-squares run, `correction_sweeps` those of the correction. With `finish` a last
    correction follows: at the final error, its terms are the least sensitive to rounding and the easiest to train.
    """

    sweeps: int = 200
    correction_sweeps: int = 100
    finish: bool = False


def epc(tensor: FactoredTensor, start: Canonical, *, sweeps: int = 100) -> Canonical:
    """Lowers the sensitivity while the relative error stays at or below that of the start.

    The objective is the sensitivity of the balanced terms. No update is accepted that raises it or violates the bound.
    The result is balanced. Stops after `sweeps`, or when a sweep gains too little. An error below SMALLEST_BOUND may
    rise to it.
    """
    terms = start.balanced()
    errors, objective = [tensor.relative_error(*terms.factors)], least_sensitivity(terms)
    limit = max(errors[0], SMALLEST_BOUND)
    projection = tensor.project_right(terms.right)
    for _ in range(sweeps):
        found, projection, square = _sweep(tensor, terms, projection, limit**2 * tensor.square)
        terms = found.balanced()
        # `balanced` rescales the columns: the projection follows, instead of being computed again.
        length = found.right.norm(dim=0)
        projection = projection * (terms.right.norm(dim=0) / length.masked_fill(length == 0, 1))
        errors.append(error_of(tensor, terms.factors, square))
        before, objective = objective, least_sensitivity(terms)
        if before - objective <= _TOLERANCE * before:
            break
    return replace(terms, errors=tuple(errors))


def cpd_epc(
    tensor: FactoredTensor,
    rank: int,
    *,
    start: str | Canonical = "best",
    schedule: CorrectionSchedule | None = None,
    seed: int = 0,
) -> Canonical:
    """Returns a decomposition by CPD-EPC (the first line of Algorithm 1): least squares, correction, least squares.

    `start` and `seed` are those of `als`. The error is at most that of the first run (or SMALLEST_BOUND).
    """
    schedule = schedule or CorrectionSchedule()
    terms = als(tensor, rank, start=start, sweeps=schedule.sweeps, seed=seed)
    terms = epc(tensor, terms, sweeps=schedule.correction_sweeps)
    terms = als(tensor, rank, start=terms, sweeps=schedule.sweeps)
    return epc(tensor, terms, sweeps=schedule.correction_sweeps) if schedule.finish else terms


def _sweep(
    tensor: FactoredTensor, terms: Canonical, projection: Tensor, bound: float
) -> tuple[Canonical, Tensor, float]:
    left, right, mix = terms.factors
    # The margin is the rounding of the squared error, which grows with the terms that cancel.
    bound = bound - _MARGIN * (tensor.square + float(terms.strength.square().sum()))
    squares = tensor.square, bound
    left, _ = _updated(left, tensor.left_products(projection, mix), (right, mix), squares)
    left_projection = tensor.project_left(left)
    right, _ = _updated(right, tensor.right_products(left_projection, mix), (left, mix), squares)
    projection = tensor.project_right(right)
    mix, square = _updated(mix, tensor.mix_products(left_projection, projection), (left, right), squares)
    return Canonical(left, right, mix), projection, square


def _updated(
    old: Tensor, products: Tensor, others: tuple[Tensor, Tensor], squares: tuple[float, float]
) -> tuple[Tensor, float]:
    """Returns the factor after its bounded update, unchanged if that raises the objective, and the squared error."""
    (other, another), (square, bound) = others, squares
    normal, weights = (other.T @ other) * (another.T @ another), column_sensitivity(other, another)
    new = bounded_update(normal, products, weights, square, bound)
    if float((weights * (new.square() - old.square())).sum()) >= 0:
        new = old
    return new, square + float((new * (new @ normal - 2 * products)).sum())


def column_sensitivity(one: Tensor, other: Tensor) -> Float[Tensor, "rank"]:
    """Returns the sensitivity per squared entry of a column of the third factor, from the two others."""
    return len(other) * one.square().sum(0) + len(one) * other.square().sum(0)


def bounded_update(
    normal: Float[Tensor, "rank rank"],
    products: Float[Tensor, "size rank"],
    weights: Float[Tensor, "rank"],
    square: float,
    bound: float,
) -> Float[Tensor, "size rank"]:
    """Returns the X that minimizes || X diag(weights)^(1/2) ||^2 under a bound on the squared error.

    The constraint is square - 2 <X, products> + <X normal, X> <= bound. One scalar eta >= 0 is unknown: X = products
    (normal + eta diag(weights))^-1. `square`, `bound` and `weights` are squared quantities. If no X satisfies the
    bound, returns the least-squares X; if X = 0 satisfies it, returns zero. The root is approached from the feasible
    side.
    """
    scale = torch.where(weights > 0, weights, torch.inf).rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * normal * scale)
    significant = values > _NULL * values[-1].clamp_min(0)
    values, vectors = values[significant], vectors[:, significant] * scale[:, None]
    rotated = products @ vectors
    energy = rotated.square().sum(0)
    slack = bound - (square - float((energy / values).sum()))
    if bound >= square or not len(values):
        return torch.zeros_like(products)
    eta = _secular_root(energy.cpu().numpy(), values.cpu().numpy(), slack) if slack > 0 else 0.0
    return (rotated / (values + eta)) @ vectors.T


def _secular_root(energy: np.ndarray, values: np.ndarray, slack: float) -> float:
    """Returns the largest eta found with phi(eta) <= slack, by bisection of its logarithm.

    phi(eta) = sum g eta^2 / (e (e + eta)^2) is the error above the least-squares error; it increases from 0 at eta = 0.
    """

    def phi(eta: float) -> float:
        return float((energy / values * (eta / (values + eta)) ** 2).sum())

    # (e + eta)^2 >= e^2 gives a point below the root.
    low = (slack / float((energy / values**3).sum())) ** 0.5
    for _ in range(_STEPS):
        if phi(4 * low) > slack:
            break
        low *= 4
    high = 4 * low
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if phi(middle) <= slack else (low, middle)
    return low
