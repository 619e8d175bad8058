"""Low-rank linear maps as two factors: the optimum of every rank for the weights or for the data, and the published
baselines ASVD, FWSVD and SVD-LLM, from their equations.
"""

from dataclasses import dataclass

import torch

from attnrx.change.decompositions.balanced import checked_gram
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

# The smallest scale, as a share of the largest: features that are always zero need an invertible scale, too.
SMALLEST_SCALE = 1e-6

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
    basis, inner = _reachable(weight)
    # The last argument bounds the entries of the moment of the outputs, and so their rounding.
    return _projected(bias, basis, inner, inner @ moment @ inner.mT, inner.square().sum() * moment.norm())


def output_pca(weight: Weight, bias: Bias, covariance: Float[Tensor, "outputs outputs"]) -> LowRank:
    """Returns the map of `activation_aware` from the second moment or covariance of W x alone.

    Statistics outside the range of W, which no output can have, are discarded.
    """
    weight, covariance = weight.detach().double(), checked_gram(covariance)
    basis, inner = _reachable(weight)
    return _projected(bias, basis, inner, basis.mT @ covariance @ basis, covariance.norm())


def asvd(weight: Weight, bias: Bias, magnitude: Float[Tensor, "inputs"], alpha: float = 0.5) -> LowRank:
    """Factors W with its inputs scaled by their mean magnitude: the SVD of W S, S = diag(magnitude^alpha).

    Activation-aware SVD (Yuan et al., 2023, arXiv 2312.05821). Of all maps of the rank it has the least |(W - W') S|.
    `magnitude` is the mean of |x| of every input feature, over calibration data; with `alpha` 0 it is the plain SVD.
    """
    weight = weight.detach().double()
    return _scaled_inputs(weight, bias, _scales(magnitude).pow(alpha))


def fwsvd(weight: Weight, bias: Bias, fisher: Float[Tensor, "outputs inputs"], *, side: str = "inputs") -> LowRank:
    """Factors W weighted by the Fisher information of its rows: the SVD of D W, D = diag(sqrt(row sums of fisher)).

    Fisher-weighted SVD (Hsu et al., 2022, arXiv 2207.00112). The paper writes a layer as x W + b, with a matrix
    [inputs, outputs] whose rows belong to the inputs, and sums the information of each row. The default `side="inputs"`
    follows it: for a weight [outputs, inputs] the sums run over the outputs, and D scales the inputs. "outputs" sums
    the rows of the weight as stored. Of all maps of the rank it has the least |(W - W') D|, or |D (W - W')| for
    "outputs".
    """
    weight = weight.detach().double()
    scale = _scales(fisher.sum(0 if side == "inputs" else 1)).sqrt()
    if side == "inputs":
        return _scaled_inputs(weight, bias, scale)
    # The outputs are the inputs of W^T, whose two factors are those of W, transposed and in reverse order.
    mirrored = _scaled_inputs(weight.mT, None, scale)
    return LowRank(mirrored.second.mT, mirrored.first.mT, mirrored.strength, bias)


def svd_llm(weight: Weight, bias: Bias, moment: Float[Tensor, "inputs inputs"]) -> LowRank:
    """Factors W with its inputs whitened: the SVD of W S with the Cholesky factor S S^T = M, then S^-1 on the right.

    SVD-LLM (Wang et al., 2024, arXiv 2403.07378). For a definite M it equals the optimum of `activation_aware`;
    a singular M gets a ridge of 1e-12 of its trace, which that optimum does not need. Raises InvalidInput for a moment
    that is zero, not finite or not symmetric.
    """
    weight = weight.detach().double()
    moment = checked_gram(moment)
    factor, failed = torch.linalg.cholesky_ex(moment)
    if int(failed):
        ridge = 1e-12 * moment.trace() * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        factor, failed = torch.linalg.cholesky_ex(moment + ridge)
    if int(failed):
        raise InvalidInput("the moment of the inputs is zero or has negative eigenvalues; give E[x x^T] of real data.")
    left, strength, right = torch.linalg.svd(weight @ factor, full_matrices=False)
    # diag(s) V^T S^-1 by a triangular solve: S is not inverted.
    first = torch.linalg.solve_triangular(factor, strength[:, None] * right, upper=False, left=False)
    return LowRank(first, left, strength, bias)


def pays(rank: int, outputs: int, inputs: int) -> bool:
    """Whether two factors of this rank have fewer entries and MACs than the matrix that they replace."""
    return rank < break_even_rank(outputs, inputs)


def break_even_rank(outputs: int, inputs: int) -> float:
    """Returns the rank at which two factors cost as much as the matrix: outputs * inputs / (outputs + inputs)."""
    return outputs * inputs / (outputs + inputs)


def _reachable(weight: Weight) -> tuple[Float[Tensor, "outputs most"], Float[Tensor, "most inputs"]]:
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


def _scaled_inputs(weight: Tensor, bias: Tensor | None, scale: Tensor) -> LowRank:
    # In this basis the left factor of the SVD is square, so that full rank is the original map.
    basis, inner = _reachable(weight)
    turn, strength, _ = torch.linalg.svd(inner * scale, full_matrices=False)
    # U^T W equals diag(s) V^T S^-1 without the division, so full rank is exact for any scale.
    return LowRank(turn.mT @ inner, basis @ turn, strength, bias)


def _scales(values: Tensor) -> Tensor:
    values = values.detach().double()
    largest = values.max()
    return torch.ones_like(values) if bool(largest == 0) else values.clamp_min(SMALLEST_SCALE * largest)
