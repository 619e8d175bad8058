"""Ranks by constrained training (Eq. 7): a nonnegative mix that ends with one owner per column."""

import torch

from attnrx.decompositions.block_term import BlockTerms, fusion_ranks, truncated_blocks
from attnrx.decompositions.canonical import Canonical, check_fit
from attnrx.decompositions.factored import FactoredTensor, unit_columns
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


def nonnegative_units(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, "slices rank"]:
    """Returns the nearest mix whose columns are nonnegative and of unit length; for use after each training step.

    For such a mix, S^H (S^H)^T of Eq. 7 is diagonal exactly when each column has one owner. A column without a positive
    value becomes one-hot at its largest value.
    """
    positive = mix.clamp_min(0)
    largest = torch.zeros_like(mix).scatter(0, mix.argmax(0, keepdim=True), 1.0)
    length = positive.norm(dim=0)
    # clamp_min avoids 0 / 0 in the branch that is not taken.
    return torch.where(length > 0, positive / length.clamp_min(torch.finfo(mix.dtype).tiny), largest)


def ownership_penalty(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, ""]:
    """Returns sum_r (|c_r|_1^2 / |c_r|_2^2 - 1), to be added to a training loss.

    Zero if and only if each column has at most one nonzero value; at most rank * (slices - 1). The length of the
    columns has no effect.
    """
    square = mix.square().sum(0)
    nonzero = square > 0
    return (mix.abs().sum(0)[nonzero].square() / square[nonzero] - 1).sum()


def owned_blocks(tensor: FactoredTensor, terms: Canonical) -> BlockTerms:
    """Returns the blocks after constrained training: owners by the largest value, then the best terms of each slice.

    The rank of a slice is limited to the rank at which it is exact, so the ranks may sum to less.
    """
    check_fit(tensor, *terms.factors)
    return truncated_blocks(tensor, [min(rank, tensor.slice_rank) for rank in fusion_ranks(terms).ranks])


def constrained_blocks(
    tensor: FactoredTensor, start: Canonical, *, steps: int = 400, learning_rate: float = 3e-3, penalty: float = 3.0
) -> BlockTerms:
    """Solves Eq. 7 for the error of the tensor alone, as a reference: `steps` of Adam, projection, growing penalty.

    The loss is the squared relative error plus the mean penalty per column, whose weight grows linearly to `penalty`.
    Ends with `owned_blocks`. The result is never better than the water-filled blocks of the same total rank, which are
    optimal with one owner per term and cheaper to compute. Raises InvalidInput for options out of range.
    """
    if steps < 0 or not learning_rate > 0 or not penalty >= 0:
        raise InvalidInput(
            f"steps={steps}, learning_rate={learning_rate}, penalty={penalty}: give steps >= 0, a positive learning "
            "rate and a penalty >= 0."
        )
    check_fit(tensor, *start.factors)
    if tensor.square == 0:
        raise InvalidInput("a tensor of zeros has no owners; give a tensor with a nonzero entry.")
    left, right, mix = (factor.requires_grad_() for factor in _signed(start, tensor.norm))
    optimizer = torch.optim.Adam([left, right, mix], lr=learning_rate)
    for step in range(steps):
        with torch.enable_grad():
            # The squared relative error, of terms that are scaled by the norm of the tensor.
            products = tensor.mix_products(tensor.project_left(left), tensor.project_right(right))
            terms = (left.T @ left) * (right.T @ right) * (mix.T @ mix)
            error = 1 - 2 * (products * mix).sum() / tensor.norm + terms.sum()
            loss = error + penalty * (step + 1) / steps * ownership_penalty(mix) / start.rank
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mix.copy_(nonnegative_units(mix))
    return owned_blocks(tensor, Canonical(left, right, mix))


def _signed(start: Canonical, norm: float) -> list[Tensor]:
    # The sign and the length of each mix column move to `left`, so that clamping loses least.
    peak = start.mix.gather(0, start.mix.abs().argmax(0)[None])[0]
    sign = torch.where(peak < 0, -1.0, 1.0).to(peak.dtype)
    mix, length = unit_columns(start.mix * sign)
    right, right_length = unit_columns(start.right)
    return [start.left * (sign * length * right_length / norm), right, nonnegative_units(mix)]
