"""Hidden units of an MLP: greedy elimination, and the least-squares compensation in the second linear map."""

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.change.decompositions.least_squares import STEP
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor

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
    plus the penalty on the change of the weights (Optimal Brain Surgeon; Hassibi and Stork, 1993). Weights and P are
    updated after every removal by a matrix of rank one. The increases are strictly increasing in that order, so that
    the k largest are those of the last k units.

    Raises:
        InvalidInput: The ridge is not positive.
    """
    # Removal of a unit is a step of elimination in P: blocks of removals collect their rank-one updates, which are then
    # applied by one product of matrices, as in blocked factorizations.
    precision, weights = torch.linalg.inv(penalized(covariance, ridge)), weight.detach().double()
    losses, left = torch.zeros(len(precision), dtype=torch.float64), torch.arange(len(precision))
    increase = torch.finfo(torch.float64).tiny
    while len(left):
        removed, errors, rows, columns = _eliminated(precision, weights, min(BLOCK, len(left)))
        for unit, loss in zip(removed, errors, strict=True):
            increase = max(loss, increase * STEP)
            losses[left[unit]] = increase
        mask = torch.ones(len(left), dtype=torch.bool)
        mask[removed] = False
        left, rows = left[mask], rows[:, mask]
        precision = precision[mask][:, mask].addmm_(rows.T, rows, alpha=-1)
        weights = weights[:, mask].addmm_(columns.T, rows, alpha=-1)
    return losses


def _eliminated(
    precision: Float[Tensor, "units units"], weights: Float[Tensor, "outputs units"], count: int
) -> tuple[list[int], list[float], Float[Tensor, "count units"], Float[Tensor, "count outputs"]]:
    """Returns the next `count` units, their errors, and the updates: precision - rows^T rows, weights - columns^T rows.

    The tables themselves are not changed: one product of matrices afterwards takes less time than `count` updates.
    """
    rows, columns = weights.new_zeros(count, len(precision)), weights.new_zeros(count, len(weights))
    # Only what the choice needs is updated at every step: the diagonal of P and the squared norms of the weights.
    diagonal, squares = precision.diagonal().clone(), weights.square().sum(0)
    removed: list[int] = []
    losses: list[float] = []
    for step in range(count):
        errors = squares.clamp_min(0) / diagonal
        errors[removed] = torch.inf
        unit = int(errors.argmin())
        # The row of P and the column of the weights of this unit, with the earlier updates of the block.
        earlier_rows, factors = rows[:step], rows[:step, unit]
        root = diagonal[unit].sqrt()
        row = (precision[unit] - factors @ earlier_rows) / root
        column = (weights[:, unit] - factors @ columns[:step]) / root
        # |w_j - column row_j|^2 = |w_j|^2 - 2 row_j (column . w_j) + row_j^2 |column|^2
        products = column @ weights - (columns[:step] @ column) @ earlier_rows
        squares -= 2 * row * products - row.square() * column.square().sum()
        diagonal -= row.square()
        removed.append(unit)
        losses.append(float(errors[unit]))
        diagonal[removed] = 1.0  # they are not chosen again, and the diagonal divides
        rows[step], columns[step] = row, column
    return removed, losses, rows, columns


def compensated(
    covariance: Float[Tensor, "units units"],
    weight: Float[Tensor, "outputs units"],
    keep: Bool[Tensor, "units"],
    ridge: float = RIDGE,
) -> Float[Tensor, "outputs kept"]:
    """Returns the weight of the kept units that best approximates the output of all units.

    It minimizes the mean squared error about the mean, plus the squared change of the kept weights times `ridge` times
    the mean variance.

    Raises:
        InvalidInput: The ridge is not positive.
    """
    moments, weights = checked_gram(covariance), weight.detach().double()
    if not bool(keep.any()):
        return weights[:, keep]
    remaining = penalized(covariance, ridge)[keep][:, keep]
    between = moments[~keep][:, keep]
    return weights[:, keep] + weights[:, ~keep] @ torch.linalg.solve(remaining, between.mT).mT


def penalized(covariance: Float[Tensor, "units units"], ridge: float) -> Float[Tensor, "units units"]:
    """Returns the covariance plus a penalty on the weights, relative to the mean variance.

    Raises:
        InvalidInput: The ridge is not positive, or the covariance is not symmetric or not finite.
    """
    moments = checked_gram(covariance)
    if not ridge > 0:
        raise InvalidInput(f"ridge={ridge}: give a positive number, e.g. {RIDGE}.")
    scale = moments.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny ** 0.5)
    return moments + ridge * scale * torch.eye(len(moments), dtype=moments.dtype)
