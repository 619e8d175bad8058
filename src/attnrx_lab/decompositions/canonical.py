"""The canonical polyadic decomposition, which is a sum of rank-one terms that all slices share.

`als` computes the decomposition by alternating least squares. `cpd_epc` adds the error-preserving correction, after
which the terms cancel each other less at the same error.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.shapes import Float, Tensor
from attnrx_lab.decompositions.factored import FactoredTensor, as_matrix, solve_normal, unit_columns

# A start from water-filling can be a saddle point. If heads are equal, no sweep moves a term to another head. A random
# start can end in a worse minimum. "best" runs both and keeps the result with the smaller error.
STARTS = ("best", "water_filling", "random")
# Below this relative error, rounding makes the fast error formula too inaccurate to compare sweeps.
_NEARLY_EXACT = 1e-4

# Left, right and mix, with the shapes [rows, rank], [columns, rank] and [slices, rank].
Factors = tuple[Float[Tensor, "rows rank"], Float[Tensor, "columns rank"], Float[Tensor, "slices _"]]


@dataclass(frozen=True)
class Canonical:
    """The tensor Y(:, :, h) = sum_r mix[h, r] left[:, r] right[:, r]^T in float64.

    `left`, `right` and `mix` are S^Q, S^K and the fusion matrix S^H in Eq. 3 of IrrAtt. `errors` contains the relative
    errors at the start and after each sweep. Raises InvalidInput if a factor is empty or not finite.
    """

    left: Float[Tensor, "rows rank"]
    right: Float[Tensor, "columns rank"]
    mix: Float[Tensor, "slices rank"]
    errors: tuple[float, ...] = ()

    def __post_init__(self):
        for name in ("left", "right", "mix"):
            object.__setattr__(self, name, as_matrix(getattr(self, name), name))

    @property
    def factors(self) -> Factors:
        return self.left, self.right, self.mix

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def strength(self) -> Float[Tensor, "rank"]:
        """The norm lambda_r of every term."""
        return self.left.norm(dim=0) * self.right.norm(dim=0) * self.mix.norm(dim=0)

    def balanced(self) -> "Canonical":
        """Returns the same tensor with minimal sensitivity: |a|^2 : |b|^2 : |c|^2 = I : J : K in each term."""
        sizes = [factor.shape[0] for factor in self.factors]
        # |a| = sqrt(I) t, |b| = sqrt(J) t, |c| = sqrt(K) t with one t per term: lambda = sqrt(I J K) t^3.
        scale = (self.strength / math.sqrt(math.prod(sizes))) ** (1 / 3)
        left, right, mix = (
            unit_columns(factor)[0] * math.sqrt(size) * scale for factor, size in zip(self.factors, sizes, strict=True)
        )
        return replace(self, left=left, right=right, mix=mix)

    def dense(self) -> Float[Tensor, "rows columns slices"]:
        """Returns the dense tensor. Only tests use it."""
        return torch.einsum("ir,jr,hr->ijh", *self.factors)


def least_sensitivity(terms: Canonical) -> float:
    """Returns the sensitivity of the balanced terms, which is 3 (IJK)^(1/3) sum_r lambda_r^(4/3).

    Suppose that all entries of the factors have small independent errors of equal variance. The sensitivity is the
    expected squared change of the tensor, divided by this variance. For any terms, the sensitivity is
    sum_r (K |a|^2 |b|^2 + J |a|^2 |c|^2 + I |b|^2 |c|^2).
    """
    size = math.prod(factor.shape[0] for factor in terms.factors)
    return float(3 * size ** (1 / 3) * terms.strength.pow(4 / 3).sum())


def water_filled(tensor: FactoredTensor, rank: int) -> Canonical:
    """Returns the `rank` strongest singular triples of all slices as terms. Only one slice uses each term.

    The result is the best approximation in which each term belongs to one slice. The squared error is the energy of the
    omitted triples. Terms are sorted by descending strength and, if the strengths are equal, by slice.
    """
    # With one owner per term the squared error is a sum over slices, and the Eckart-Young theorem applies to each.
    left, strength, right = tensor.svd()
    slices, triples = strength.shape
    selected = strength.flatten().sort(descending=True, stable=True).indices[:rank]
    owner, triple = selected // triples, selected % triples
    mix = torch.zeros(slices, rank, dtype=torch.float64, device=strength.device)
    mix[owner, torch.arange(rank, device=owner.device)] = strength[owner, triple]
    return Canonical(left[owner, :, triple].T, right[owner, :, triple].T, mix)


def als(
    tensor: FactoredTensor,
    rank: int,
    *,
    start: str | Canonical = "best",
    sweeps: int = 200,
    tolerance: float = 1e-8,
    seed: int = 0,
) -> Canonical:
    """Returns a decomposition of `rank` terms by alternating least squares (CP-ALS). The error never increases.

    `start` is one of STARTS, or a decomposition with this rank. With "best", the function starts from water-filling and
    from random terms, and returns the result with the smaller error. `seed` seeds the random terms. The iteration stops
    after `sweeps` sweeps, or when a sweep lowers the relative error by less than the fraction `tolerance`. In the
    result, the columns of `left` and `right` have unit length, and `mix` contains the strengths. Raises InvalidInput if
    the rank is out of range, and UnknownName for an unknown start.
    """
    if start == "best":
        runs = (
            als(tensor, rank, start=single, sweeps=sweeps, tolerance=tolerance, seed=seed)
            for single in ("water_filling", "random")
        )
        return min(runs, key=lambda terms: terms.errors[-1])
    # A sweep needs only four products of rows x (slices * inner) x rank, because each projection serves two modes.
    best = starting_terms(tensor, rank, start, seed).factors
    errors = [tensor.relative_error(*best)]
    right, mix = unit_columns(best[1])[0], best[2]
    projection = tensor.project_right(right)
    for _ in range(sweeps):
        left, right, mix, projection, square = _sweep(tensor, right, projection, mix)
        error = error_of(tensor, (left, right, mix), square)
        converged = errors[-1] - error <= tolerance * errors[-1]
        # Near convergence, rounding can make the last sweep slightly worse.
        if error <= errors[-1]:
            best = left, right, mix
            errors.append(error)
        if converged:
            break
    # If no sweep improved the start, its columns may have any length.
    (left, left_length), (right, right_length), mix = unit_columns(best[0]), unit_columns(best[1]), best[2]
    return Canonical(left, right, mix * left_length * right_length, tuple(errors))


def _sweep(
    tensor: FactoredTensor, right: Tensor, projection: Tensor, mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    # If the fixed factors have unit columns, the normal matrix of a step has a unit diagonal.
    mix = unit_columns(mix)[0]
    mix_gram = mix.T @ mix
    left = unit_columns(solve_normal((right.T @ right) * mix_gram, tensor.left_products(projection, mix)))[0]
    left_gram, left_projection = left.T @ left, tensor.project_left(left)
    right = unit_columns(solve_normal(left_gram * mix_gram, tensor.right_products(left_projection, mix)))[0]
    normal, projection = left_gram * (right.T @ right), tensor.project_right(right)
    products = tensor.mix_products(left_projection, projection)
    mix = solve_normal(normal, products)
    # The squared error is |Y|^2 - 2 <C, G> + <C Gamma, C>, so it needs no other pass over the tensor.
    square = tensor.square + float((mix * (mix @ normal - 2 * products)).sum())
    return left, right, mix, projection, square


def starting_terms(tensor: FactoredTensor, rank: int, start: str | Canonical, seed: int) -> Canonical:
    """Returns the terms to start from. If `start` is a decomposition, it is returned unchanged.

    Raises:
        InvalidInput: The rank is 0, or larger than an exact decomposition needs.
        UnknownName: The start is not one of STARTS.
    """
    largest = len(tensor.left) * tensor.slice_rank
    if not 1 <= rank <= largest:
        raise InvalidInput(f"rank={rank}: give 1 to {largest}, where every slice of this tensor is exact.")
    if isinstance(start, Canonical):
        return start
    if start == "water_filling":
        return water_filled(tensor, rank)
    if start == "random":
        generator = torch.Generator().manual_seed(seed)
        # Random terms are drawn on the CPU in float64, so every device starts from the same terms.
        samples = (torch.randn(size, rank, dtype=torch.float64, generator=generator) for size in tensor.shape)
        left, right, mix = (factor.to(tensor.left.device) for factor in samples)
        return Canonical(left, right, mix)
    raise UnknownName("start", start, STARTS)


def error_of(tensor: FactoredTensor, factors: Factors, square: float) -> float:
    """Returns the relative error, from the squared residual `square` or, if it is too small, from `factors`."""
    if square > _NEARLY_EXACT**2 * tensor.square:
        return (square / tensor.square) ** 0.5
    return tensor.relative_error(*factors)


# The smallest relative error that can serve as a bound, because its square must exceed the rounding of || Y ||^2.
SMALLEST_BOUND = 1e-6
_MARGIN = 64 * torch.finfo(torch.float64).eps
# Eigenvalues of a normal matrix below this share of the largest one are rounding.
_NULL_SHARE = 1e-14
_STEPS = 60  # each step halves an interval, so 60 are enough for all digits of float64
_TOLERANCE = 1e-6  # a correction stops if a sweep lowers the sensitivity by less than this share


def epc(tensor: FactoredTensor, start: Canonical, *, sweeps: int = 100) -> Canonical:
    """Lowers the sensitivity of the terms without raising the relative error above its value at the start.

    The objective is the sensitivity of the balanced terms (`least_sensitivity`). The function accepts an update only if
    the objective does not rise and the error stays within the bound. The result is balanced. The iteration stops after
    `sweeps` sweeps, or when a sweep hardly lowers the sensitivity. An error below SMALLEST_BOUND may rise to
    SMALLEST_BOUND.
    """
    # The algorithm is the error-preserving correction of Phan, Tichavsky and Cichocki (arXiv 1709.08349). Its objective
    # is the sensitivity instead of the norms of the terms. The update of each factor has a closed form with one unknown
    # number (`bounded_update`). The published solver finds the same minimum by quadratic programs with Kronecker
    # structure.
    terms = start.balanced()
    errors, objective = [tensor.relative_error(*terms.factors)], least_sensitivity(terms)
    limit = max(errors[0], SMALLEST_BOUND)
    projection = tensor.project_right(terms.right)
    for _ in range(sweeps):
        update, projection, square = _corrected(tensor, terms, projection, limit**2 * tensor.square)
        terms = update.balanced()
        # `balanced` rescales the columns. Rescale the projection, too, because that is cheaper than computing it again.
        length = update.right.norm(dim=0)
        projection = projection * (terms.right.norm(dim=0) / length.masked_fill(length == 0, 1))
        errors.append(error_of(tensor, terms.factors, square))
        previous, objective = objective, least_sensitivity(terms)
        if previous - objective <= _TOLERANCE * previous:
            break
    return replace(terms, errors=tuple(errors))


def cpd_epc(
    tensor: FactoredTensor,
    rank: int,
    *,
    start: str | Canonical = "best",
    sweeps: int = 200,
    finish: bool = False,
    seed: int = 0,
) -> Canonical:
    """Returns a decomposition by CPD-EPC (the first line of IrrAtt's Algorithm 1).

    CPD-EPC runs least squares (`als`), the correction (`epc`), and least squares again. `start`, `sweeps` and `seed`
    are as in `als`. The error is at most SMALLEST_BOUND or the error after the first least squares, whichever is
    larger. `finish=True` runs the correction once more, after which the terms are less sensitive to rounding and easier
    to train.
    """
    terms = epc(tensor, als(tensor, rank, start=start, sweeps=sweeps, seed=seed))
    terms = als(tensor, rank, start=terms, sweeps=sweeps)
    return epc(tensor, terms) if finish else terms


def _corrected(
    tensor: FactoredTensor, terms: Canonical, projection: Tensor, bound: float
) -> tuple[Canonical, Tensor, float]:
    left, right, mix = terms.factors
    # The margin allows for the rounding of the squared error, which grows if terms cancel.
    bound = bound - _MARGIN * (tensor.square + float(terms.strength.square().sum()))
    squares = tensor.square, bound
    left, _ = _updated(left, tensor.left_products(projection, mix), (right, mix), squares)
    left_projection = tensor.project_left(left)
    right, _ = _updated(right, tensor.right_products(left_projection, mix), (left, mix), squares)
    projection = tensor.project_right(right)
    mix, square = _updated(mix, tensor.mix_products(left_projection, projection), (left, right), squares)
    return Canonical(left, right, mix), projection, square


def _updated(
    old: Tensor, products: Tensor, others: tuple[Tensor, Tensor], squares: tuple[float, float]
) -> tuple[Tensor, float]:
    """Returns the new factor and the squared error. If the update would raise the objective, keeps the old factor."""
    (other, another), (square, bound) = others, squares
    normal, weights = (other.T @ other) * (another.T @ another), column_sensitivity(other, another)
    new = bounded_update(normal, products, weights, square, bound)
    # Near the bound, rounding decides whether `old` is feasible. If it is infeasible, the new factor may be larger.
    if float((weights * (new.square() - old.square())).sum()) >= 0:
        new = old
    return new, square + float((new * (new @ normal - 2 * products)).sum())


def column_sensitivity(one: Float[Tensor, "rows rank"], other: Float[Tensor, "columns rank"]) -> Float[Tensor, "rank"]:
    """Returns how much a squared entry of each column adds to the sensitivity, computed from the other two factors."""
    return len(other) * one.square().sum(0) + len(one) * other.square().sum(0)


def bounded_update(
    normal: Float[Tensor, "rank rank"],
    products: Float[Tensor, "size rank"],
    weights: Float[Tensor, "rank"],
    square: float,
    bound: float,
) -> Float[Tensor, "size rank"]:
    """Returns the X that minimizes || X diag(weights)^(1/2) ||^2 under a bound on the squared error.

    The constraint is square - 2 <X, products> + <X normal, X> <= bound. The solution is
    X = products (normal + eta diag(weights))^-1 with one unknown scalar eta >= 0. `square`, `bound` and `weights` are
    squared quantities. If no X satisfies the bound, the function returns the least-squares X. If X = 0 satisfies the
    bound, the function returns zero. Otherwise, it searches for the largest eta whose X satisfies the bound.
    """
    # With the new variables X diag(weights)^(1/2), the objective is a plain norm, and normal becomes Q diag(e) Q^T.
    # With Z = products diag(weights)^(-1/2) Q the problem separates into columns: X = Z diag(1 / (e + eta)). The error
    # depends on Z only through g_r = |Z_r|^2. As eta rises, the error grows and the objective falls. So the minimum is
    # at the largest feasible eta.
    scale = torch.where(weights > 0, weights, torch.inf).rsqrt()  # a column without weight belongs to a term of zeros
    values, vectors = torch.linalg.eigh(scale[:, None] * normal * scale)
    significant = values > _NULL_SHARE * values[-1].clamp_min(0)
    values, vectors = values[significant], vectors[:, significant] * scale[:, None]
    rotated = products @ vectors
    energy = rotated.square().sum(0)
    slack = bound - (square - float((energy / values).sum()))  # the bound minus the least-squares error (eta = 0)
    if bound >= square or not len(values):
        return torch.zeros_like(products)
    eta = _secular_root(energy.cpu().numpy(), values.cpu().numpy(), slack) if slack > 0 else 0.0
    return (rotated / (values + eta)) @ vectors.T


def _secular_root(energy: np.ndarray, values: np.ndarray, slack: float) -> float:
    """Returns the largest eta with phi(eta) <= slack, found by bisection on a logarithmic scale.

    The function phi(eta) = sum g eta^2 / (e (e + eta)^2), with g in `energy` and e in `values`, is the squared error
    minus the least-squares error. phi rises with eta, from phi(0) = 0.
    """

    def phi(eta: float) -> float:
        return float((energy / values * (eta / (values + eta)) ** 2).sum())

    # Because (e + eta)^2 >= e^2, the first value of `low` is below the root. Factors of 4 find a point above it. The
    # bisection uses geometric means, because eta can have any order of magnitude.
    low = (slack / float((energy / values**3).sum())) ** 0.5
    for _ in range(_STEPS):
        if phi(4 * low) > slack:
            break
        low *= 4
    high = 4 * low
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if phi(middle) <= slack else (low, middle)
    return low  # `low` is on the feasible side, so the error never exceeds the bound
