"""Low-rank linear maps as two factors: the optimum of every rank for the weights or for the data, and the published
baselines ASVD, FWSVD and SVD-LLM, from their equations.
"""

from dataclasses import dataclass

import torch

from attnrx.decompositions.grams import checked_gram, gram_spectrum, require_finite
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

# A direction with less than this share of the largest strength is rounding.
NULL_SHARE = 1e-13
# The smallest scale, as a share of the largest: features that are always zero need an invertible scale, too.
SMALLEST_SCALE = 1e-6

Weight = Float[Tensor, "outputs inputs"]
Bias = Float[Tensor, "outputs"] | None


@dataclass(frozen=True)
class LowRank:
    """The map x -> second @ (first @ x) + bias that replaces x -> weight @ x + bias; float64, nested in the rank.

    `strength` is the contribution of each direction in the metric of the method, descending, zero for directions
    without energy in it. All min(outputs, inputs) strengths are listed for every rank: the squared error in that metric
    is the sum of their squares beyond the rank. If a mean is matched, the bias depends on the rank: it is center +
    second @ shift.
    """

    first: Float[Tensor, "rank inputs"]
    second: Float[Tensor, "outputs rank"]
    strength: Float[Tensor, "most"]
    center: Float[Tensor, "outputs"] | None = None
    shift: Float[Tensor, "rank"] | None = None

    @property
    def rank(self) -> int:
        return self.first.shape[0]

    @property
    def weight(self) -> Float[Tensor, "outputs inputs"]:
        return self.second @ self.first

    @property
    def bias(self) -> Float[Tensor, "outputs"] | None:
        """The bias for this rank, None if the original has none and no mean was matched."""
        if self.center is None or self.shift is None:
            return self.center
        return self.center + self.second @ self.shift

    def truncated(self, rank: int) -> "LowRank":
        """Returns the map with the first `rank` directions; raises InvalidInput for a rank out of range."""
        if not 0 <= rank <= self.rank:
            raise InvalidInput(f"rank {rank} was requested, but this map has {self.rank} directions.")
        shift = None if self.shift is None else self.shift[:rank]
        return LowRank(self.first[:rank], self.second[:, :rank], self.strength, self.center, shift)


def plain_svd(weight: Weight, bias: Bias = None) -> LowRank:
    """Returns the nearest matrix of every rank in the Frobenius norm (Eckart and Young, 1936), with the same bias."""
    weight, bias = _checked_map(weight, bias)
    left, strength, right = torch.linalg.svd(weight, full_matrices=False)
    return LowRank(strength[:, None] * right, left, strength, bias)


def activation_aware(
    weight: Weight,
    bias: Bias,
    moment: Float[Tensor, "inputs inputs"],
    mean: Float[Tensor, "inputs"] | None = None,
) -> LowRank:
    """Returns the map of every rank with the least E |y - y'|^2 over inputs of this second moment.

    The outputs are projected on the leading eigenvectors V of W M W^T: y' = V V^T W x + b. With the mean of the inputs,
    their covariance replaces M, and the bias matches the mean of the outputs: y' = V V^T (W x + b - mu) + mu with mu =
    W mean + b, the best affine map of the rank. M may be singular: full rank is still the original map for any input.
    Raises InvalidInput for shapes that do not match, and moments that are not finite, symmetric and semidefinite.
    """
    weight, bias = _checked_map(weight, bias)
    moment = _checked_moment(moment, weight.shape[1], "moment of the inputs")
    basis, inner = _reachable(weight)
    # The rounding is that of the moment before the mean is subtracted.
    bound = inner.square().sum() * moment.norm()
    if mean is not None:
        mean = _checked_mean(mean, weight.shape[1], "mean of the inputs")
        bias = weight @ mean if bias is None else weight @ mean + bias
        moment = moment - torch.outer(mean, mean)
    strength, turn = _directions(inner @ moment @ inner.mT, bound, inner)
    first = turn.mT @ inner
    return LowRank(first, basis @ turn, strength, bias, None if mean is None else -first @ mean)


def output_pca(
    weight: Weight, bias: Bias, covariance: Float[Tensor, "outputs outputs"], mean: Float[Tensor, "outputs"]
) -> LowRank:
    """Returns the centred map of `activation_aware` from the covariance and the mean of its outputs y = W x + b alone.

    y' = V V^T (W x + b - mu) + mu, with V the leading eigenvectors of the covariance. Statistics outside the range of
    W, which no output can have, are discarded. Raises InvalidInput as `activation_aware` does.
    """
    weight, bias = _checked_map(weight, bias)
    covariance = _checked_moment(covariance, weight.shape[0], "covariance of the outputs")
    fixed = weight.new_zeros(weight.shape[0]) if bias is None else bias
    offset = _checked_mean(mean, weight.shape[0], "mean of the outputs") - fixed
    basis, inner = _reachable(weight)
    strength, turn = _directions(basis.mT @ covariance @ basis, covariance.norm(), inner)
    inner_offset = basis.mT @ offset
    return LowRank(turn.mT @ inner, basis @ turn, strength, fixed + basis @ inner_offset, -turn.mT @ inner_offset)


def asvd(weight: Weight, bias: Bias, magnitude: Float[Tensor, "inputs"], alpha: float = 0.5) -> LowRank:
    """Factors W with its inputs scaled by their mean magnitude: the SVD of W S, S = diag(magnitude^alpha).

    Activation-aware SVD (Yuan et al., 2023, arXiv 2312.05821). Of all maps of the rank it has the least |(W - W') S|.
    `magnitude` is the mean of |x| of every input feature, over calibration data; with `alpha` 0 it is the plain SVD.
    Raises InvalidInput for magnitudes that are negative, not finite or not one per input.
    """
    weight, bias = _checked_map(weight, bias)
    scale = _scales(magnitude, weight.shape[1], "mean magnitude of the inputs").pow(alpha)
    return _scaled_inputs(weight, bias, scale)


def fwsvd(weight: Weight, bias: Bias, fisher: Float[Tensor, "outputs inputs"], *, side: str = "inputs") -> LowRank:
    """Factors W weighted by the Fisher information of its rows: the SVD of D W, D = diag(sqrt(row sums of fisher)).

    Fisher-weighted SVD (Hsu et al., 2022, arXiv 2207.00112). The paper writes a layer as x W + b, with a matrix
    [inputs, outputs] whose rows belong to the inputs, and sums the information of each row. The default `side="inputs"`
    follows it: for a weight [outputs, inputs] the sums run over the outputs, and D scales the inputs. "outputs" sums
    the rows of the weight as stored. Of all maps of the rank it has the least |(W - W') D|, or |D (W - W')| for
    "outputs". Raises InvalidInput for another side, and information that is negative, not finite or of another shape.
    """
    weight, bias = _checked_map(weight, bias)
    if side not in ("outputs", "inputs"):
        raise InvalidInput(f'side={side!r}: choose "outputs" or "inputs".')
    if fisher.shape != weight.shape:
        raise InvalidInput(f"the Fisher information must be {list(weight.shape)}, found {list(fisher.shape)}.")
    rows = fisher.detach().double().sum(1 if side == "outputs" else 0)
    scale = _scales(rows, len(rows), "Fisher information").sqrt()
    if side == "inputs":
        return _scaled_inputs(weight, bias, scale)
    mirrored = _scaled_inputs(weight.mT, None, scale)
    return LowRank(mirrored.second.mT, mirrored.first.mT, mirrored.strength, bias)


def svd_llm(weight: Weight, bias: Bias, moment: Float[Tensor, "inputs inputs"]) -> LowRank:
    """Factors W with its inputs whitened: the SVD of W S with the Cholesky factor S S^T = M, then S^-1 on the right.

    SVD-LLM (Wang et al., 2024, arXiv 2403.07378). For a definite M it equals the optimum of `activation_aware` without
    a mean; a singular M gets a ridge of 1e-12 of its trace, which that optimum does not need. Raises InvalidInput for a
    moment that is zero, or not finite, symmetric and semidefinite.
    """
    weight, bias = _checked_map(weight, bias)
    moment = _checked_moment(moment, weight.shape[1], "moment of the inputs")
    factor, failed = torch.linalg.cholesky_ex(moment)
    if int(failed):
        ridge = 1e-12 * moment.trace() * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        factor, failed = torch.linalg.cholesky_ex(moment + ridge)
    if int(failed):
        raise InvalidInput("the moment of the inputs is zero or has negative eigenvalues; give E[x x^T] of real data.")
    left, strength, right = torch.linalg.svd(weight @ factor, full_matrices=False)
    first = torch.linalg.solve_triangular(factor, strength[:, None] * right, upper=False, left=False)
    return LowRank(first, left, strength, bias)


def pays(rank: int, outputs: int, inputs: int) -> bool:
    """Whether two factors of this rank have fewer entries and MACs than the matrix that they replace."""
    return rank < break_even_rank(outputs, inputs)


def break_even_rank(outputs: int, inputs: int) -> float:
    """Returns the rank at which two factors cost as much as the matrix: outputs * inputs / (outputs + inputs)."""
    if outputs < 1 or inputs < 1:
        raise InvalidInput(f"a matrix needs a positive number of outputs and inputs, found {outputs} and {inputs}.")
    return outputs * inputs / (outputs + inputs)


def _checked_map(weight: Weight, bias: Bias) -> tuple[Weight, Bias]:
    """Returns both in float64; raises InvalidInput if they are empty, not finite or of different sizes."""
    if weight.ndim != 2 or weight.numel() == 0 or (bias is not None and bias.shape != weight.shape[:1]):
        found = "no bias" if bias is None else f"a bias {list(bias.shape)}"
        raise InvalidInput(f"a map needs a weight [outputs, inputs], found {list(weight.shape)} with {found}.")
    require_finite(weight, "weight of the map")
    if bias is not None:
        require_finite(bias, "bias of the map")
        bias = bias.detach().double()
    return weight.detach().double(), bias


def _reachable(weight: Weight) -> tuple[Float[Tensor, "outputs most"], Float[Tensor, "most inputs"]]:
    """Returns an orthonormal basis of all possible outputs of a matrix, and the matrix in that basis.

    A square rotation in that basis rewrites the matrix exactly, for any data; a rotation of a larger space would not.
    """
    outputs, inputs = weight.shape
    if outputs > inputs:
        basis, inner = torch.linalg.qr(weight)
        return basis, inner
    return torch.eye(outputs, dtype=weight.dtype, device=weight.device), weight


def _order_unseen(
    vectors: Float[Tensor, "most most"], strength: Float[Tensor, "most"], inner: Float[Tensor, "most inputs"]
) -> Float[Tensor, "most most"]:
    """Rotates the null directions of a metric so that they descend in their contribution to the matrix itself."""
    num_significant = int((strength > NULL_SHARE * strength[0]).sum())
    if num_significant == len(strength):
        return vectors
    known, null = vectors[:, :num_significant], vectors[:, num_significant:]
    return torch.cat([known, null @ torch.linalg.svd(null.mT @ inner, full_matrices=False).U], dim=1)


def _directions(moment: Tensor, bound: Tensor, inner: Tensor) -> tuple[Float[Tensor, "most"], Float[Tensor, "most _"]]:
    """Returns the strengths and directions of outputs of this moment.

    Strengths within the rounding of numbers as large as `bound` are zero.
    """
    values, vectors = gram_spectrum(moment[None], "moment of the data")
    rounding = len(moment) * torch.finfo(moment.dtype).eps * bound
    strength = torch.where(values[0] > rounding, values[0], 0).sqrt()
    return strength, _order_unseen(vectors[0], strength, inner)


def _checked_moment(moment: Tensor, size: int, what: str) -> Tensor:
    if moment.shape != (size, size):
        raise InvalidInput(f"the {what} must be [{size}, {size}], found {list(moment.shape)}.")
    return checked_gram(moment[None], what)[0]


def _checked_mean(mean: Tensor, size: int, what: str) -> Tensor:
    if mean.shape != (size,):
        raise InvalidInput(f"the {what} must be [{size}], found {list(mean.shape)}.")
    require_finite(mean, what)
    return mean.detach().double()


def _scaled_inputs(weight: Tensor, bias: Tensor | None, scale: Tensor) -> LowRank:
    basis, inner = _reachable(weight)
    vectors, strength, _ = torch.linalg.svd(inner * scale, full_matrices=False)
    turn = _order_unseen(vectors, strength, inner)
    # U^T W equals diag(s) V^T S^-1 without the division, so full rank is exact for any scale.
    return LowRank(turn.mT @ inner, basis @ turn, strength, bias)


def _scales(values: Tensor, count: int, what: str) -> Tensor:
    require_finite(values, what)
    if values.shape != (count,) or bool((values < 0).any()):
        raise InvalidInput(f"the {what} must be {count} numbers, none negative, found {list(values.shape)}.")
    values = values.detach().double()
    largest = values.max()
    return torch.ones_like(values) if bool(largest == 0) else values.clamp_min(SMALLEST_SCALE * largest)
