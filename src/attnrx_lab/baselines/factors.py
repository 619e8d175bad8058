"""Published two-factor approximations of linear maps, from their equations: ASVD, FWSVD and SVD-LLM."""

import torch

from attnrx.change.decompositions import LowRank
from attnrx.change.decompositions.balanced import checked_gram
from attnrx.change.decompositions.low_rank import Bias, Weight, output_basis
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

# The smallest scale, as a share of the largest: features that are always zero need an invertible scale, too.
SMALLEST_SCALE = 1e-6


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


def _scaled_inputs(weight: Tensor, bias: Tensor | None, scale: Tensor) -> LowRank:
    # In this basis the left factor of the SVD is square, so that full rank is the original map.
    basis, inner = output_basis(weight)
    turn, strength, _ = torch.linalg.svd(inner * scale, full_matrices=False)
    # U^T W equals diag(s) V^T S^-1 without the division, so full rank is exact for any scale.
    return LowRank(turn.mT @ inner, basis @ turn, strength, bias)


def _scales(values: Tensor) -> Tensor:
    values = values.detach().double()
    largest = values.max()
    return torch.ones_like(values) if bool(largest == 0) else values.clamp_min(SMALLEST_SCALE * largest)
