"""Norm-minimizing least squares: the smallest solution whose squared error is within a bound."""

import math

import numpy as np
import torch

from attnrx.shapes import Float, Tensor

# Eigenvalues of a normal matrix below this share of the largest one are rounding.
_NULL = 1e-14
_STEPS = 60


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
