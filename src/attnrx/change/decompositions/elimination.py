"""Greedy backward elimination: hidden units, with a compensation by the map that reads them, and heads."""

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor

# The weight of the penalty on changes of the second map, relative to the mean variance of a unit. Of 1e-4 to 0.3 it has
# the smallest KL divergence on images of other classes than those of the calibration (docs/results/hidden.md).
RIDGE = 0.1
# So many eliminated units are deleted from the tables at once.
BLOCK = 64
# A later removal counts as more than all earlier ones, so that ties do not change the order of elimination.
STEP = 1 + 1e-9
# Of heads, relative to the mean variance: makes the covariance invertible where features are constant or duplicates.
DAMPING = 1e-8


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
    # applied by products of matrices, as in blocked factorizations. Of the weights only their products with each other
    # are needed, so that the rows of a block stay in the cache whatever the number of outputs is.
    weight = weight.detach().double()
    precision, products = torch.linalg.inv(penalized(covariance, ridge)), weight.mT @ weight
    losses, left = torch.zeros(len(precision), dtype=torch.float64), torch.arange(len(precision))
    increase, is_left = torch.finfo(torch.float64).tiny, torch.ones(len(precision), dtype=torch.bool)
    while bool(is_left.any()):
        removed, errors, rows, changes = _eliminated(precision, products, is_left)
        for unit, loss in zip(removed, errors, strict=True):
            increase = max(loss, increase * STEP)
            losses[left[unit]] = increase
        is_left[removed] = False
        precision.addmm_(rows.T, rows, alpha=-1)
        products.addmm_(changes.T, rows, alpha=-1).addmm_(rows.T, changes, alpha=-1)
        # Tables without the removed units are smaller, and copied: at every quarter that is gone.
        if is_left.double().mean() <= 0.75:
            chosen = is_left.nonzero()[:, 0]
            precision, products = (each[chosen].index_select(1, chosen) for each in (precision, products))
            left, is_left = left[chosen], is_left[chosen]
    return losses


def _eliminated(
    precision: Float[Tensor, "units units"], products: Float[Tensor, "units units"], is_left: Bool[Tensor, "units"]
) -> tuple[list[int], list[float], Float[Tensor, "count units"], Float[Tensor, "count units"]]:
    """Returns the next BLOCK of the units that are left, their errors, and the updates: precision - rows^T rows, and
    products - changes^T rows - rows^T changes.

    The tables themselves are not changed: products of matrices afterwards take less time than `count` updates.
    """
    gone, count = ~is_left, min(BLOCK, int(is_left.sum()))
    rows, changes = precision.new_zeros(count, len(precision)), precision.new_zeros(count, len(precision))
    # Only what the choice needs is updated at every step: the diagonal of P and the squared norms of the weights.
    diagonal, squares = precision.diagonal().clone(), products.diagonal().clone()
    removed: list[int] = []
    losses: list[float] = []
    for step in range(count):
        errors = squares.clamp_min(0) / diagonal
        errors[gone] = torch.inf  # also in place of NaN: their diagonals are zero
        unit = int(errors.argmin())
        loss, root = float(errors[unit]), diagonal[unit].sqrt()
        # The rows of this unit in both tables, with the earlier updates of the block.
        earlier, factors = rows[:step], rows[:step, unit]
        row = (precision[unit] - factors @ earlier) / root
        # w_j becomes w_j - row_j w_u / root, with the squared norm |w_j|^2 - 2 row_j (w_u . w_j) / root + row_j^2 loss.
        product = (products[unit] - changes[:step, unit] @ earlier - factors @ changes[:step]) / root
        change = product - loss / 2 * row
        squares -= 2 * row * change
        diagonal -= row.square()
        removed.append(unit)
        losses.append(loss)
        gone[unit] = True
        rows[step], changes[step] = row, change
    return removed, losses, rows, changes


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
    penalty, weights = penalized(covariance, ridge), weight.detach().double()
    if not bool(keep.any()):
        return weights[:, keep]
    # What the removed units add, projected on those that stay; the penalty is on the diagonal alone.
    columns = penalty[:, keep]
    removed = weights[:, ~keep] @ columns[~keep]
    factor = torch.linalg.cholesky(columns[keep])
    return weights[:, keep] + torch.cholesky_solve(removed.mT, factor).mT


def penalized(covariance: Float[Tensor, "units units"], ridge: float) -> Float[Tensor, "units units"]:
    """Returns the covariance plus a penalty on the weights, relative to the mean variance.

    Raises:
        InvalidInput: The ridge is not positive, or the covariance is not symmetric or not finite.
    """
    moments = checked_gram(covariance)
    if not ridge > 0:
        raise InvalidInput(f"ridge={ridge}: give a positive number, e.g. {RIDGE}.")
    scale = moments.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny ** 0.5)
    moments.diagonal().add_(ridge * scale)  # a tensor of its own
    return moments


def elimination_losses(
    covariance: Float[Tensor, "features features"], gram: Float[Tensor, "units size size"]
) -> Float[Tensor, "units"]:
    """Returns for every unit the increase of the error at its removal, in the order of greedy backward elimination.

    The features o of the units are concatenated, with covariance C; `gram` is W^T W of the weights that read each unit.
    The best affine estimate of the removed features S from the others has the covariance (P_SS)^-1 with P = C^-1, the
    block form of Optimal Brain Surgeon. The error of a removal is the sum of tr(gram_u ((P_SS)^-1)_uu) over the removed
    units u. Every step removes the unit with the smallest error. The increases are strictly increasing in that order,
    so that the k largest are those of the last k units.
    """
    units, size = gram.shape[:2]
    moments, weights = checked_gram(covariance), checked_gram(gram)
    tiny = torch.finfo(torch.float64).tiny
    scale = moments.diagonal().mean().clamp_min(tiny)
    precision = torch.linalg.inv(moments + DAMPING * scale * torch.eye(len(moments), dtype=moments.dtype))
    features = torch.arange(len(moments)).unflatten(0, (units, size))
    # Every candidate is evaluated anew, without updates of the inverse: heads are few.
    losses, removed, error, increase = torch.zeros(units, dtype=torch.float64), [], 0.0, tiny
    while len(removed) < units:
        errors = {
            unit: _error(precision, weights, features, [*removed, unit]) for unit in range(units) if unit not in removed
        }
        weakest = min(errors, key=lambda unit: errors[unit])
        increase = max(errors[weakest] - error, increase * STEP)
        losses[weakest], error = increase, errors[weakest]
        removed.append(weakest)
    return losses


def _error(precision: Tensor, weights: Tensor, features: Tensor, removed: list[int]) -> float:
    rows = features[removed].flatten()
    left = torch.linalg.inv(precision[rows[:, None], rows])
    size = features.shape[1]
    # The diagonal blocks of the removed units, [size, size, removed]; other blocks do not count, as `gram` is per unit.
    blocks = left.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2)
    return float((blocks.permute(2, 0, 1) * weights[removed]).sum())
