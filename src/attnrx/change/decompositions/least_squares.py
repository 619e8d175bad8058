"""Least squares of heads: units eliminated one after the other, and the strengths that best approximate scores."""

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Bool, Float, Tensor

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


# Eigenvalues of a normal matrix summed from float32 that are below this share of the largest one are rounding.
_NULL = 1e-6


class StrengthFit:
    """Accumulates the normal equations of: min over s of sum_i Var_{j ~ a_i} [ T_ij - scale sum_r l_ir s_r r_jr ].

    T are the scores of a reference and a_i = softmax(T_i) its attention. To second order the sum is twice the KL
    divergence of the attention from the reference's: softmax ignores a constant per query, and errors at keys without
    attention have no effect. Memory is one square matrix of the number of terms per head, independent of the number of
    samples.
    """

    def __init__(self, heads: int, terms: int):
        self.normal = torch.zeros(heads, terms, terms, dtype=torch.float64)
        self.right_side = torch.zeros(heads, terms, dtype=torch.float64)
        self.target_energy = torch.zeros(heads, dtype=torch.float64)
        self.samples = 0

    def observe(
        self,
        left: Float[Tensor, "batch queries heads terms"],
        right: Float[Tensor, "batch keys heads terms"],
        target: Float[Tensor, "batch heads queries keys"],
        scale: float,
    ) -> None:
        """Adds one batch: the terms of every token, and the target scores."""
        for sample in range(left.shape[0]):
            # One sample at a time, to bound memory: its products have queries x keys x terms entries.
            lefts, rights = scale * left[sample].movedim(1, 0), right[sample].movedim(1, 0)  # [heads, tokens, terms]
            attention = target[sample].softmax(-1)
            root = attention.sqrt()  # in both factors of the normal equations: together the weight is a_ij
            # Centred by the attention of every query, which makes the sum of squares a variance: [heads, queries, keys,
            # terms], then [heads, queries * keys, terms].
            centred = rights[:, None] - (attention @ rights)[:, :, None]
            products = (centred * lefts[:, :, None] * root[..., None]).flatten(1, 2)
            errors = root * (target[sample] - (attention * target[sample]).sum(-1, keepdim=True))
            targets = errors.flatten(1)
            # Sums over all samples need float64, which not every device has.
            self.normal += (products.mT @ products).to("cpu", torch.float64)
            self.right_side += (targets[:, None] @ products).to("cpu", torch.float64).squeeze(1)
            self.target_energy += targets.square().sum(-1).to("cpu", torch.float64)
        self.samples += left.shape[0]

    def solve(
        self, keep: Bool[Tensor, "heads terms"], start: Float[Tensor, "heads terms"]
    ) -> Float[Tensor, "heads terms"]:
        """Returns the best strengths of the kept terms, zero elsewhere; undetermined strengths remain as in `start`.

        The error is never above that of `start`, head by head.

        Raises:
            InvalidInput: No sample was observed.
        """
        if self.samples == 0:
            raise InvalidInput("the least-squares strengths need at least one observed sample; give calibration data.")
        start = torch.where(keep, start, 0).to(self.normal)
        strength = start.clone()
        for head, mask in enumerate(keep):
            if bool(mask.any()):
                normal = self.normal[head][mask][:, mask]
                # The pseudoinverse corrects the start: what the data does not determine stays as it was.
                residual = self.right_side[head, mask] - normal @ start[head, mask]
                strength[head, mask] += torch.linalg.pinv(normal, rtol=_NULL, hermitian=True) @ residual
        # Without the eigenvalues below _NULL a fit can be worse than its start.
        better = self.relative_error(strength) <= self.relative_error(start)
        return torch.where(better[:, None], strength, start)

    def relative_error(self, strength: Float[Tensor, "heads terms"]) -> Float[Tensor, "heads"]:
        """Returns the root of the sum relative to that of zero strengths, over all samples; 0 for a constant target."""
        square = (
            self.target_energy
            - 2 * (strength * self.right_side).sum(-1)
            + torch.einsum("hr,hrs,hs->h", strength, self.normal, strength)
        )
        share = square.clamp_min(0) / self.target_energy.clamp_min(torch.finfo(torch.float64).tiny)
        return torch.where(self.target_energy > 0, share.sqrt(), torch.zeros_like(share))
