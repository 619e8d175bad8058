"""Published low-rank factorizations as baselines: ASVD, FWSVD and SVD-LLM, from their equations."""

import torch

from attnrx.decompositions.grams import checked_gram, require_finite
from attnrx.decompositions.low_rank import LowRank, checked_map, order_unseen, reachable
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

# The smallest scale, as a share of the largest: features that are always zero need an invertible scale, too.
SMALLEST_SCALE = 1e-6


def asvd(
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    magnitude: Float[Tensor, "inputs"],
    alpha: float = 0.5,
) -> LowRank:
    """Factors W with its inputs scaled by their mean magnitude: the SVD of W S, S = diag(magnitude^alpha).

    Activation-aware SVD (Yuan et al., 2023, arXiv 2312.05821). Of all maps of the rank it has the least |(W - W') S|.

    Args:
        weight: the matrix of the map.
        bias: its bias, which is unchanged.
        magnitude: the mean of |x| of every input feature, over calibration data.
        alpha: 0 is the plain SVD.

    Raises:
        InvalidInput: Magnitudes are negative, not finite or not one per input.
    """
    weight, bias = checked_map(weight, bias)
    scale = _scales(magnitude, weight.shape[1], "mean magnitude of the inputs").pow(alpha)
    return _scaled_inputs(weight, bias, scale)


def fwsvd(
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    fisher: Float[Tensor, "outputs inputs"],
    *,
    side: str = "inputs",
) -> LowRank:
    """Factors W weighted by the Fisher information of its rows: the SVD of D W, D = diag(sqrt(row sums of fisher)).

    Fisher-weighted SVD (Hsu et al., 2022, arXiv 2207.00112). The paper writes a layer as x W + b, with a matrix
    [inputs, outputs] whose rows belong to the inputs, and sums the information of each row. The default `side="inputs"`
    follows it: for a weight [outputs, inputs] the sums run over the outputs, and D scales the inputs. "outputs" sums
    the rows of the weight as stored. Of all maps of the rank it has the least |(W - W') D|, or |D (W - W')| for
    "outputs".

    Raises:
        InvalidInput: Another side, or information that is negative, not finite or of another shape.
    """
    weight, bias = checked_map(weight, bias)
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


def svd_llm(
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    moment: Float[Tensor, "inputs inputs"],
) -> LowRank:
    """Factors W with its inputs whitened: the SVD of W S with the Cholesky factor S S^T = M, then S^-1 on the right.

    SVD-LLM (Wang et al., 2024, arXiv 2403.07378). For a definite M it equals the optimum of `activation_aware` without
    a mean; a singular M gets a ridge of 1e-12 of its trace, which that optimum does not need.

    Raises:
        InvalidInput: The moment is zero, or not finite, symmetric and semidefinite.
    """
    weight, bias = checked_map(weight, bias)
    moment = checked_gram(moment[None], "moment of the inputs")[0]
    if len(moment) != weight.shape[1]:
        raise InvalidInput(f"the moment must be as wide as the inputs, {weight.shape[1]}, found {len(moment)}.")
    factor, failed = torch.linalg.cholesky_ex(moment)
    if int(failed):
        ridge = 1e-12 * moment.trace() * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
        factor, failed = torch.linalg.cholesky_ex(moment + ridge)
    if int(failed):
        raise InvalidInput("the moment of the inputs is zero or has negative eigenvalues; give E[x x^T] of real data.")
    left, strength, right = torch.linalg.svd(weight @ factor, full_matrices=False)
    first = torch.linalg.solve_triangular(factor, strength[:, None] * right, upper=False, left=False)
    return LowRank(first, left, strength, bias)


def _scaled_inputs(weight: Tensor, bias: Tensor | None, scale: Tensor) -> LowRank:
    basis, inner = reachable(weight)
    vectors, strength, _ = torch.linalg.svd(inner * scale, full_matrices=False)
    turn = order_unseen(vectors, strength, inner)
    # U^T W equals diag(s) V^T S^-1 without the division, so full rank is exact for any scale.
    return LowRank(turn.mT @ inner, basis @ turn, strength, bias)


def _scales(values: Tensor, count: int, what: str) -> Tensor:
    require_finite(values, what)
    if values.shape != (count,) or bool((values < 0).any()):
        raise InvalidInput(f"the {what} must be {count} numbers, none negative, found {list(values.shape)}.")
    values = values.detach().double()
    largest = values.max()
    return torch.ones_like(values) if bool(largest == 0) else values.clamp_min(SMALLEST_SCALE * largest)
