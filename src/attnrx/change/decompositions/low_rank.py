"""Directions of the outputs of a linear map, of which the first r give the best map of rank r.

Projected on r orthonormal directions V, given as rows, y = W x + b becomes V^T V W x + b: two factors of rank r. All
directions together are the original map for any input.
"""

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.shapes import Float, Tensor

Weight = Float[Tensor, "outputs inputs"]
Directions = tuple[Float[Tensor, "most"], Float[Tensor, "most outputs"]]
"""Strengths, descending, and directions: the squared error of rank r is the sum of the squared strengths beyond it."""


def plain_svd(weight: Weight) -> Directions:
    """Returns the directions of the nearest matrix of every rank in the Frobenius norm (Eckart and Young, 1936)."""
    left, strength, _ = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    return strength, left.mT


def activation_aware(weight: Weight, moment: Float[Tensor, "inputs inputs"]) -> Directions:
    """Returns the directions of the least E |W x - W' x|^2 over inputs of this second moment or covariance.

    They are the leading eigenvectors of W M W^T. M may be singular. Raises InvalidInput for moments that are not finite
    or not symmetric.
    """
    weight, moment = weight.detach().double(), checked_gram(moment)
    basis, inner = output_basis(weight)
    # The last argument bounds the entries of the moment of the outputs, and so their rounding.
    return _leading(basis, inner @ moment @ inner.mT, inner.square().sum() * moment.norm())


def output_pca(weight: Weight, covariance: Float[Tensor, "outputs outputs"]) -> Directions:
    """Returns the directions of `activation_aware` from the second moment or covariance of W x alone.

    Statistics outside the range of W, which no output can have, are discarded.
    """
    weight, covariance = weight.detach().double(), checked_gram(covariance)
    basis, _ = output_basis(weight)
    return _leading(basis, basis.mT @ covariance @ basis, covariance.norm())


def pays(rank: int, outputs: int, inputs: int) -> bool:
    """Whether two factors of this rank have fewer entries and MACs than the matrix that they replace."""
    return rank < break_even_rank(outputs, inputs)


def break_even_rank(outputs: int, inputs: int) -> float:
    """Returns the rank at which two factors cost as much as the matrix: outputs * inputs / (outputs + inputs)."""
    return outputs * inputs / (outputs + inputs)


def output_basis(weight: Weight) -> tuple[Float[Tensor, "outputs most"], Float[Tensor, "most inputs"]]:
    """Returns an orthonormal basis of all possible outputs of a matrix, and the matrix in that basis.

    A square rotation in that basis rewrites the matrix exactly, for any data; a rotation of a larger space would not.
    """
    outputs, inputs = weight.shape
    if outputs > inputs:
        basis, inner = torch.linalg.qr(weight)
        return basis, inner
    return torch.eye(outputs, dtype=weight.dtype, device=weight.device), weight


def _leading(basis: Tensor, moment: Tensor, bound: Tensor) -> Directions:
    """Returns the leading eigenvectors of a moment in a basis; strengths within the rounding of numbers as large as
    `bound` are zero.
    """
    # Descending: eigh sorts ascending.
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh((moment + moment.mT) / 2))
    rounding = len(moment) * torch.finfo(moment.dtype).eps * bound
    return torch.where(values > rounding, values, 0).sqrt(), (basis @ vectors).mT
