"""The error-preserving correction of a canonical decomposition (CPD-EPC): less cancellation at the same error."""

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from attnrx.decompositions.canonical import (
    Canonical,
    Trace,
    als,
    check_fit,
    check_sweeps,
    error_of,
    least_sensitivity,
)
from attnrx.decompositions.factored import FactoredTensor
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

# The smallest relative error that can be a bound: its square must exceed the rounding of || Y ||^2.
SMALLEST_BOUND = 1e-6
_MARGIN = 64 * torch.finfo(torch.float64).eps
# Eigenvalues of a normal matrix below this share of the largest one are rounding.
_NULL = 1e-14
_STEPS = 60  # each halves an interval, in the worst case: enough for all digits of float64


@dataclass(frozen=True)
class CorrectionSchedule:
    """The options of CPD-EPC: alternating least squares, a correction, and least squares from the corrected terms.

    `sweeps` and `tolerance` are those of each least-squares run, `correction_sweeps` and `correction_tolerance` those
    of the correction. With `finish` a last correction follows: at the final error, its terms are the least sensitive to
    rounding and the easiest to train.
    """

    sweeps: int = 200
    tolerance: float = 1e-8
    correction_sweeps: int = 100
    correction_tolerance: float = 1e-6
    finish: bool = False


def epc(
    tensor: FactoredTensor,
    start: Canonical,
    bound: float | None = None,
    *,
    sweeps: int = 100,
    tolerance: float = 1e-6,
) -> Canonical:
    """Lowers the sensitivity while the relative error stays at or below `bound`, by default the error of the start.

    The objective is the sensitivity of the balanced terms. No update is accepted that raises it or violates the bound.
    The result is balanced; its trace has the errors and objectives per sweep. Stops after `sweeps`, or when a sweep
    lowers the objective by less than `tolerance` of itself. An error below SMALLEST_BOUND may rise to it. Raises
    InvalidInput for a bound below the error of the start or below SMALLEST_BOUND.
    """
    check_fit(tensor, *start.factors)
    check_sweeps(sweeps, tolerance)
    terms = start.balanced()
    errors = [tensor.relative_error(*terms.factors)]
    limit = _limit(errors[0], bound)
    objectives, converged = [least_sensitivity(terms)], False
    projection = tensor.project_right(terms.right)
    for _ in range(sweeps):
        found, projection, square = _sweep(tensor, terms, projection, limit**2 * tensor.square)
        terms = found.balanced()
        # `balanced` rescales the columns: the projection follows, instead of being computed again.
        length = found.right.norm(dim=0)
        projection = projection * (terms.right.norm(dim=0) / length.masked_fill(length == 0, 1))
        errors.append(error_of(tensor, terms.factors, square))
        objectives.append(least_sensitivity(terms))
        converged = objectives[-2] - objectives[-1] <= tolerance * objectives[-2]
        if converged:
            break
    return replace(terms, trace=Trace(tuple(errors), tuple(objectives), converged))


def cpd_epc(
    tensor: FactoredTensor,
    rank: int,
    *,
    start: str | Canonical = "best",
    schedule: CorrectionSchedule | None = None,
    seed: int = 0,
) -> Canonical:
    """Returns a decomposition by CPD-EPC (the first line of Algorithm 1): least squares, correction, least squares.

    `start` and `seed` are those of `als`. The trace is that of the last run. The error is at most that of the first run
    (or SMALLEST_BOUND).
    """
    schedule = schedule or CorrectionSchedule()
    correct = partial(epc, tensor, sweeps=schedule.correction_sweeps, tolerance=schedule.correction_tolerance)
    terms = als(tensor, rank, start=start, sweeps=schedule.sweeps, tolerance=schedule.tolerance, seed=seed)
    terms = als(tensor, rank, start=correct(terms), sweeps=schedule.sweeps, tolerance=schedule.tolerance)
    return correct(terms) if schedule.finish else terms


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


def _limit(error: float, bound: float | None) -> float:
    if bound is None:
        return max(error, SMALLEST_BOUND)
    if not bound >= SMALLEST_BOUND:
        raise InvalidInput(f"bound={bound}: rounding hides an error below {SMALLEST_BOUND}; give at least that.")
    if error > bound * (1 + 1e-12):
        raise InvalidInput(f"the start has error {error}, above bound={bound}: raise it or improve the start.")
    return bound


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
    """Returns the largest eta found with phi(eta) <= slack; phi increases from 0 at eta = 0."""
    # (e + eta)^2 >= e^2 gives a point below the root.
    low = (slack / float((energy / values**3).sum())) ** 0.5
    high = 4 * low
    for _ in range(_STEPS):
        if _phi_and_slope(energy, values, high)[0] > slack:
            break
        low, high = high, 4 * high
    middle = low
    for _ in range(_STEPS):
        phi, log_slope = _phi_and_slope(energy, values, middle)
        low, high = (middle, high) if phi <= slack else (low, middle)
        if 0 <= slack - phi <= 1e-12 * slack or high <= low * (1 + 1e-15):
            break
        # Newton on log phi over log eta, which is nearly linear, aimed slightly below the root; else bisection.
        middle = middle * math.exp(math.log(slack * (1 - 5e-13) / phi) * phi / log_slope)
        if not low < middle < high:
            middle = math.sqrt(low * high)
    return low


def _phi_and_slope(energy: np.ndarray, values: np.ndarray, eta: float) -> tuple[float, float]:
    """Returns phi(eta) = sum g eta^2 / (e (e + eta)^2), the error above the least-squares error, and eta phi'(eta)."""
    both = values + eta
    parts = energy / values * (eta / both) ** 2
    return float(parts.sum()), float((2 * parts * values / both).sum())
