"""Ranks by constrained training (Eq. 7): a mix that is never negative and, in the end, has one owner a column."""

from dataclasses import dataclass

import torch

from attnrx.decompositions.block_term import BlockTerms, fusion_ranks, truncated_blocks
from attnrx.decompositions.canonical import Canonical, check_fit
from attnrx.decompositions.factored import FactoredTensor, unit_columns
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class ConstrainedFit:
    """The knobs of `constrained_blocks`: steps of Adam, their size, and the weight that the penalty grows to."""

    steps: int = 400
    learning_rate: float = 3e-3
    penalty: float = 3.0

    def __post_init__(self):
        if self.steps < 0 or not self.learning_rate > 0 or not self.penalty >= 0:
            raise InvalidInput(f"{self}: give steps >= 0, a positive learning rate and a penalty >= 0.")


def nonnegative_units(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, "slices rank"]:
    """Returns the nearest mix whose columns have no negative value and length one; for after each training step.

    With length one and nothing negative, S^H (S^H)^T of Eq. 7 is diagonal exactly when each column has one owner. A
    column with nothing positive becomes its largest value alone.
    """
    positive = mix.clamp_min(0)
    largest = torch.zeros_like(mix).scatter(0, mix.argmax(0, keepdim=True), 1.0)
    length = positive.norm(dim=0)
    return torch.where(length > 0, positive / length.clamp_min(torch.finfo(mix.dtype).tiny), largest)


def ownership_penalty(mix: Float[Tensor, "slices rank"]) -> Float[Tensor, ""]:
    """Returns sum_r (|c_r|_1^2 / |c_r|_2^2 - 1), to be added to a training loss.

    Zero if and only if each column has at most one value that is not zero; at most rank * (slices - 1). The length of
    the columns does not matter.
    """
    square = mix.square().sum(0)
    seen = square > 0
    return (mix.abs().sum(0)[seen].square() / square[seen] - 1).sum()


def owned_blocks(tensor: FactoredTensor, terms: Canonical) -> BlockTerms:
    """Ends the constrained training: hard owners by the largest value, then the best terms of each slice anew.

    A slice that owns more terms than it can use gets all that it can, so that the ranks may sum to less.
    """
    check_fit(tensor, terms)
    rows, columns, _ = tensor.shape
    most = min(rows, columns, tensor.left.shape[1])
    return truncated_blocks(tensor, [min(rank, most) for rank in fusion_ranks(terms).ranks])


def constrained_blocks(tensor: FactoredTensor, start: Canonical, *, knobs: ConstrainedFit | None = None) -> BlockTerms:
    """Solves Eq. 7 for the error of the tensor alone, as a reference: gradient steps, projection, growing penalty.

    The loss is the squared relative error plus the mean penalty of a column, whose weight grows linearly to
    `knobs.penalty`. Ends with `owned_blocks`. Can never beat the water-filled blocks of the same total rank, which
    are the best with one owner a term: on the weights alone those are the better and cheaper choice.
    """
    knobs = knobs or ConstrainedFit()
    check_fit(tensor, start)
    if tensor.square == 0:
        raise InvalidInput("a tensor of zeros has no owners to be found.")
    left, right, mix = (factor.requires_grad_() for factor in _signed(start, tensor.norm))
    optimizer = torch.optim.Adam([left, right, mix], lr=knobs.learning_rate)
    for step in range(knobs.steps):
        weight = knobs.penalty * (step + 1) / knobs.steps
        with torch.enable_grad():
            loss = _squared_error(tensor, left, right, mix) + weight * ownership_penalty(mix) / start.rank
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            mix.copy_(nonnegative_units(mix))
    return owned_blocks(tensor, Canonical(left, right, mix))


def _signed(start: Canonical, norm: float) -> list[Tensor]:
    # The sign and the length of a column of the mix may go to the left: then clamping loses least.
    peak = start.mix.gather(0, start.mix.abs().argmax(0)[None])[0]
    sign = torch.where(peak < 0, -1.0, 1.0).to(peak.dtype)
    mix, length = unit_columns(start.mix * sign)
    right, right_length = unit_columns(start.right)
    return [start.left * (sign * length * right_length / norm), right, nonnegative_units(mix)]


def _squared_error(tensor: FactoredTensor, left: Tensor, right: Tensor, mix: Tensor) -> Float[Tensor, ""]:
    """The squared relative error of terms that are scaled by the norm of the tensor."""
    products = tensor.mix_products(tensor.project_left(left), tensor.project_right(right))
    terms = (left.T @ left) * (right.T @ right) * (mix.T @ mix)
    return 1 - 2 * (products * mix).sum() / tensor.norm + terms.sum()
