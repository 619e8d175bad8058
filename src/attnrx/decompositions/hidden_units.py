"""Hidden units of an MLP: greedy elimination, and the least-squares compensation in the second linear map."""

import torch

from attnrx.decompositions.balanced import checked_gram
from attnrx.decompositions.least_squares import STEP
from attnrx.errors import InvalidInput
from attnrx.shapes import Bool, Float, Tensor

# The weight of the penalty on changes of the second map, relative to the mean variance of a unit. Of 1e-4 to 0.3 it has
# the smallest KL divergence on images of other classes than those of the calibration (docs/results/hidden.md).
RIDGE = 0.1
# So many eliminated units are deleted from the tables at once.
BLOCK = 64


def unit_losses(
    covariance: Float[Tensor, "units units"], weight: Float[Tensor, "outputs units"], ridge: float = RIDGE
) -> Float[Tensor, "units"]:
    """Returns for every unit the increase of the error at its removal, in the order of greedy backward elimination.

    `covariance` is that of the activations, `weight` the map that reads them. With P = (covariance + penalty)^-1 the
    removal of unit u, compensated by the units that remain, adds |w_u|^2 / P_uu to the mean squared error of the output
    (Optimal Brain Surgeon; Hassibi and Stork, 1993). Weights and P are updated after every removal by a matrix of rank
    one. The increases are strictly increasing in that order, so that the k largest are those of the last k units.
    """
    moments, weights = _penalized(covariance, ridge), weight.detach().double().clone()
    precision, units = torch.linalg.inv(moments), len(moments)
    losses = torch.zeros(units, dtype=torch.float64)
    left = torch.arange(units)
    errors = weights.square().sum(0)
    gone: list[int] = []
    increase = torch.finfo(torch.float64).tiny
    for _ in range(units):
        found = errors / precision.diagonal()
        found[gone] = torch.inf
        unit = int(found.argmin())
        increase = max(float(found[unit]), increase * STEP)
        losses[left[unit]] = increase
        row = precision[unit] / precision[unit, unit]
        weights.addr_(weights[:, unit].clone(), row, alpha=-1)
        precision.addr_(precision[:, unit].clone(), row, alpha=-1)
        gone.append(unit)
        if len(gone) == min(BLOCK, len(left)):
            stays = torch.ones(len(left), dtype=torch.bool)
            stays[gone] = False
            left, weights, precision, gone = left[stays], weights[:, stays], precision[stays][:, stays], []
        else:
            precision[unit, unit] = 1.0  # the removed unit is not chosen again, and its diagonal divides
        errors = weights.square().sum(0)
    return losses


def compensated(
    covariance: Float[Tensor, "units units"],
    weight: Float[Tensor, "outputs units"],
    keep: Bool[Tensor, "units"],
    ridge: float = RIDGE,
) -> Float[Tensor, "outputs kept"]:
    """Returns the weight of the kept units that best approximates the output of all units.

    It minimizes the mean squared error about the mean, plus the squared change of the kept weights times `ridge` times
    the mean variance.
    """
    moments, weights = checked_gram(covariance), weight.detach().double()
    if not bool(keep.any()):
        return weights[:, keep]
    penalized = _penalized(covariance, ridge)[keep][:, keep]
    between = moments[~keep][:, keep]
    return weights[:, keep] + weights[:, ~keep] @ torch.linalg.solve(penalized, between.mT).mT


def _penalized(covariance: Tensor, ridge: float) -> Float[Tensor, "units units"]:
    moments = checked_gram(covariance)
    if not ridge > 0:
        raise InvalidInput(f"ridge={ridge}: give a positive number, e.g. {RIDGE}.")
    scale = moments.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny ** 0.5)
    return moments + ridge * scale * torch.eye(len(moments), dtype=moments.dtype)
