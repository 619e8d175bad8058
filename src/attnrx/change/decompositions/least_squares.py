"""Least squares of heads: units eliminated one after the other."""

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.shapes import Float, Tensor

# Relative to the mean variance: makes the covariance invertible where features are constant or duplicates.
DAMPING = 1e-8
# A later removal counts as more than all earlier ones, so that ties do not change the order of elimination.
STEP = 1 + 1e-9


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
