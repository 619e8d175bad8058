"""Low-rank linear maps as two factors: the optimum of every rank for the weights or for the data."""

from dataclasses import dataclass

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.shapes import Float, Tensor

Weight = Float[Tensor, "outputs inputs"]
Bias = Float[Tensor, "outputs"] | None


@dataclass(frozen=True)
class LowRank:
    """The map x -> second @ (first @ x) + bias that replaces x -> weight @ x + bias; float64, nested in the rank.

    `strength` is the contribution of each direction in the metric of the method, descending, zero for directions
    without energy in it. All min(outputs, inputs) strengths are listed for every rank: the squared error in that metric
    is the sum of their squares beyond the rank. The bias is that of the original.
    """

    first: Float[Tensor, "rank inputs"]
    second: Float[Tensor, "outputs rank"]
    strength: Float[Tensor, "most"]
    bias: Bias = None

    @property
    def rank(self) -> int:
        return self.first.shape[0]

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        return self.second @ self.first

    def truncated(self, rank: int) -> "LowRank":
        """Returns the map with the first `rank` directions."""
        return LowRank(self.first[:rank], self.second[:, :rank], self.strength, self.bias)


def plain_svd(weight: Weight, bias: Bias = None) -> LowRank:
    """Returns the nearest matrix of every rank in the Frobenius norm (Eckart and Young, 1936), with the same bias."""
    weight = weight.detach().double()
    left, strength, right = torch.linalg.svd(weight, full_matrices=False)
    return LowRank(strength[:, None] * right, left, strength, bias)


def activation_aware(weight: Weight, bias: Bias, moment: Float[Tensor, "inputs inputs"]) -> LowRank:
    """Returns the map of every rank with the least E |W x - W' x|^2 over inputs of this second moment or covariance.

    The outputs are projected on the leading eigenvectors V of W M W^T: y' = V V^T W x + b. M may be singular: full rank
    is still the original map for any input. Raises InvalidInput for moments that are not finite or not symmetric.
    """
    weight, moment = weight.detach().double(), checked_gram(moment)
    basis, inner = output_basis(weight)
    # The last argument bounds the entries of the moment of the outputs, and so their rounding.
    return _projected(bias, basis, inner, inner @ moment @ inner.mT, inner.square().sum() * moment.norm())


def output_pca(weight: Weight, bias: Bias, covariance: Float[Tensor, "outputs outputs"]) -> LowRank:
    """Returns the map of `activation_aware` from the second moment or covariance of W x alone.

    Statistics outside the range of W, which no output can have, are discarded.
    """
    weight, covariance = weight.detach().double(), checked_gram(covariance)
    basis, inner = output_basis(weight)
    return _projected(bias, basis, inner, basis.mT @ covariance @ basis, covariance.norm())


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


def _projected(bias: Bias, basis: Tensor, inner: Tensor, moment: Tensor, bound: Tensor) -> LowRank:
    """Projects the outputs basis @ inner on the leading eigenvectors of their moment.

    Strengths within the rounding of numbers as large as `bound` are zero.
    """
    # Descending: eigh sorts ascending. Orthonormal vectors, so that all of them together are the original map.
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh((moment + moment.mT) / 2))
    rounding = len(moment) * torch.finfo(moment.dtype).eps * bound
    strength = torch.where(values > rounding, values, 0).sqrt()
    return LowRank(vectors.mT @ inner, basis @ vectors, strength, bias)
