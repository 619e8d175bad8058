"""The Tucker decomposition, and the general block-term decomposition, which is a sum of Tucker terms.

Appendix A.2 of IrrAtt defines both decompositions, but the paper does not use them. The forms that the paper uses are
special cases. CP SlimAtt is a Tucker decomposition whose core is diagonal in every slice. BTD-(L, L, 1) is a sum of
terms with a diagonal core and one column of mixing weights each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx_lab.decompositions.factored import FactoredTensor


@dataclass(frozen=True)
class Tucker:
    """The tensor Y = core x_1 left x_2 right x_3 mix, whose factors have orthonormal columns (IrrAtt, Appendix A.2.2).

    If `hosvd` computed the decomposition, the slices of the core are mutually orthogonal in every mode, and are sorted
    by descending norm.
    """

    core: Float[Tensor, "left_rank right_rank mix_rank"]
    left: Float[Tensor, "rows left_rank"]
    right: Float[Tensor, "columns right_rank"]
    mix: Float[Tensor, "slices mix_rank"]

    @property
    def slice_cores(self) -> Float[Tensor, "slices left_rank right_rank"]:
        """The core of every slice: Y_h = left slice_cores[h] right^T."""
        return torch.einsum("ijk,hk->hij", self.core, self.mix)

    def dense(self) -> Float[Tensor, "rows columns slices"]:
        """Returns the dense tensor. Only tests use it."""
        return torch.einsum("ijk,ai,bj,hk->abh", self.core, self.left, self.right, self.mix)


def hosvd(tensor: FactoredTensor, ranks: tuple[int, int, int]) -> Tucker:
    """Returns the truncated higher-order SVD (De Lathauwer, De Moor and Vandewalle, 2000).

    The factor of each mode consists of the leading left singular vectors of the mode's unfolding. The core is the
    tensor multiplied by all transposed factors. The squared error is at most the sum of the energies that are omitted
    in the three unfoldings. So it is at most three times the smallest possible squared error.

    Raises:
        InvalidInput: A rank is below 1 or above the size of its mode.
    """
    if any(not 1 <= rank <= size for rank, size in zip(ranks, tensor.shape, strict=True)):
        raise InvalidInput(f"Tucker ranks {ranks} of a tensor {tensor.shape}: give 1 to the size of every mode.")
    left, right = (_unfolded(tensor, mode)[:, :rank] for mode, rank in enumerate(ranks[:2]))
    cores = tensor.project_left(left).mT @ tensor.project_right(right)  # of every slice
    # The third unfolding has a row for every slice. QR computes a common orthonormal basis for each side. So small
    # slices determine the singular vectors, and the full slices of rows x columns numbers are never formed.
    basis_left, basis_right = (torch.linalg.qr(side.flatten(0, 1).mT).Q for side in (tensor.left, tensor.right))
    slices = tensor.project_left(basis_left).mT @ tensor.project_right(basis_right)
    mix = torch.linalg.svd(slices.flatten(1), full_matrices=False).U[:, : ranks[2]]
    return Tucker(torch.einsum("hij,hk->ijk", cores, mix), left, right, mix)


def _unfolded(tensor: FactoredTensor, mode: int) -> Float[Tensor, "size vectors"]:
    """Returns the left singular vectors of the tensor's unfolding in the first or second mode, strongest first.

    If there are fewer vectors than the size of the mode, the function appends a basis of the remaining space.
    """
    own, other = (tensor.left, tensor.right) if mode == 0 else (tensor.right, tensor.left)
    # Y_h = own_h^T other_h. With other_h^T = Q R, own_h^T R^T has the left singular vectors of Y_h, but fewer columns.
    triangles = torch.linalg.qr(other.mT, mode="r").R
    thin = (own.mT @ triangles.mT).transpose(0, 1).flatten(1)
    # QR first reduces the wide matrix to a square or tall one, because an SVD of the wide matrix would also compute its
    # large right side.
    return torch.linalg.svd(torch.linalg.qr(thin.mT, mode="r").R.mT, full_matrices=True).U


def tucker_terms(
    tensor: FactoredTensor, count: int, ranks: tuple[int, int, int], sweeps: int = 5
) -> tuple[Tucker, ...]:
    """Returns the general block-term decomposition into `count` Tucker terms with these ranks (IrrAtt, Appendix A.2.3).

    Each term in turn is replaced by the `hosvd` of the tensor minus the other terms. A truncated HOSVD is not the best
    approximation, so the error can rise. The function returns the terms of the sweep with the smallest error. With
    `count=1` the result is the Tucker decomposition.

    Raises:
        InvalidInput: `count` is below 1, or a rank is below 1 or above the size of its mode.
    """
    if count < 1:
        raise InvalidInput(f"{count} Tucker terms: give one or more.")
    terms: list[Tucker] = []
    best, least = (), float("inf")
    for _ in range(sweeps if count > 1 else 1):
        for place in range(count):
            others = [term for at, term in enumerate(terms) if at != place]
            terms[place : place + 1] = [hosvd(_residual(tensor, others), ranks)]
        left = _residual(tensor, terms).square
        if left < least:
            best, least = tuple(terms), left
    return best


def _residual(tensor: FactoredTensor, terms: Sequence[Tucker]) -> FactoredTensor:
    """Returns the tensor minus the terms, in factored form. Each term adds rows to both factors of every slice."""
    left, right = [tensor.left], [tensor.right]
    for term in terms:
        left.append(term.left.mT.expand(len(term.mix), -1, -1))
        right.append(-term.slice_cores @ term.right.mT)
    return FactoredTensor(torch.cat(left, 1), torch.cat(right, 1))
