"""The canonical polyadic decomposition: a sum of rank-one terms shared by all slices, by alternating least squares."""

import math
from dataclasses import dataclass, replace

import torch

from attnrx.decompositions.factored import FactoredTensor, as_matrix, solve_normal, unit_columns
from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Tensor

# Water-filling can start at a saddle: if heads are equal, no sweep moves a term to another head. A random start can end
# in a worse minimum. "best" runs both and keeps the smaller error.
STARTS = ("best", "water_filling", "random")
# Below this relative error, the fast error formula has too much rounding to compare sweeps.
_NEARLY_EXACT = 1e-4

# Of shapes [rows, rank], [columns, rank] and [slices, rank].
Factors = tuple[Float[Tensor, "rows rank"], Float[Tensor, "columns rank"], Float[Tensor, "slices _"]]


@dataclass(frozen=True)
class Canonical:
    """Y(:, :, h) = sum_r mix[h, r] left[:, r] right[:, r]^T (Eq. 3: S^Q, S^K and the fusion matrix S^H), in float64.

    `errors` are the relative errors of the iteration, at the start and after each sweep. Raises InvalidInput for
    factors that are empty or not finite.
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
        """Returns the same tensor, scaled for least sensitivity: |a|^2 : |b|^2 : |c|^2 = I : J : K in each term."""
        sizes = [factor.shape[0] for factor in self.factors]
        scale = (self.strength / math.sqrt(math.prod(sizes))) ** (1 / 3)
        left, right, mix = (
            unit_columns(factor)[0] * math.sqrt(size) * scale for factor, size in zip(self.factors, sizes, strict=True)
        )
        return replace(self, left=left, right=right, mix=mix)

    def dense(self) -> Float[Tensor, "rows columns slices"]:
        """Returns the dense tensor; for tests only."""
        return torch.einsum("ir,jr,hr->ijh", *self.factors)


def least_sensitivity(terms: Canonical) -> float:
    """Returns the sensitivity after `balanced`, in closed form: 3 (IJK)^(1/3) sum_r lambda_r^(4/3).

    The sensitivity is the expected squared change of the tensor, per variance of an independent error in every entry of
    the factors, in the limit of zero variance: sum_r (K |a|^2 |b|^2 + J |a|^2 |c|^2 + I |b|^2 |c|^2).
    """
    size = math.prod(factor.shape[0] for factor in terms.factors)
    return float(3 * size ** (1 / 3) * terms.strength.pow(4 / 3).sum())


def water_filled(tensor: FactoredTensor, rank: int) -> Canonical:
    """Returns the `rank` strongest singular triples of all slices, each owned by its slice.

    This is the best approximation with one owner per term: its squared error is the energy of the discarded triples.
    Terms are sorted by descending strength; on ties the earlier slice comes first.
    """
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
    """Returns a decomposition of `rank` terms by alternating least squares (CP-ALS); the error never increases.

    `start` is one of STARTS or a decomposition of that rank: "best" runs from water-filling and from random terms and
    returns the result with the smaller error. `seed` is that of the random terms. Stops after `sweeps`, or when a sweep
    lowers the relative error by less than `tolerance` of itself. The returned columns of left and right have unit
    length; mix contains the strength. Raises InvalidInput for a rank out of range, UnknownName for another start.
    """
    if start == "best":
        runs = (
            als(tensor, rank, start=single, sweeps=sweeps, tolerance=tolerance, seed=seed)
            for single in ("water_filling", "random")
        )
        return min(runs, key=lambda terms: terms.errors[-1])
    factors = starting_terms(tensor, rank, start, seed).factors
    (left, right, mix), errors = alternated(tensor, factors, sweeps, tolerance)
    # A start that no sweep improved has columns of any length.
    (left, left_length), (right, right_length) = unit_columns(left), unit_columns(right)
    return Canonical(left, right, mix * left_length * right_length, errors)


def alternated(
    tensor: FactoredTensor, factors: Factors, sweeps: int, tolerance: float, belongs: Tensor | None = None
) -> tuple[Factors, tuple[float, ...]]:
    """Improves three factors by alternating least squares; the error never increases.

    With `belongs` [blocks, rank], one-hot, the terms of a block share one column of the mix [slices, blocks].
    """
    best, errors = factors, [tensor.relative_error(*_untied(factors, belongs))]
    right, mix = unit_columns(factors[1])[0], factors[2]
    projection = tensor.project_right(right)
    for _ in range(sweeps):
        left, right, mix, projection, square = _sweep(tensor, right, projection, mix, belongs)
        error = error_of(tensor, _untied((left, right, mix), belongs), square)
        converged = errors[-1] - error <= tolerance * errors[-1]
        # Near convergence, rounding can make the last sweep slightly worse.
        if error <= errors[-1]:
            best = left, right, mix
            errors.append(error)
        if converged:
            break
    return best, tuple(errors)


def _untied(factors: Factors, belongs: Tensor | None) -> Factors:
    """Returns the factors with one column of the mix per term."""
    left, right, mix = factors
    return left, right, mix if belongs is None else mix @ belongs


def _sweep(
    tensor: FactoredTensor, right: Tensor, projection: Tensor, mix: Tensor, belongs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    # Unit columns of the fixed factors give the normal matrix of a step a unit diagonal.
    if belongs is not None:
        right, length = unit_columns(right)
        projection = projection / length.masked_fill(length == 0, 1)
    mix = unit_columns(mix)[0]
    full = mix if belongs is None else mix @ belongs
    full_gram = full.T @ full
    left = unit_columns(solve_normal((right.T @ right) * full_gram, tensor.left_products(projection, full)))[0]
    left_gram, left_projection = left.T @ left, tensor.project_left(left)
    right = solve_normal(left_gram * full_gram, tensor.right_products(left_projection, full))
    if belongs is None:  # terms of one block share a column of the mix, so their lengths stay in `right`
        right = unit_columns(right)[0]
    normal, projection = left_gram * (right.T @ right), tensor.project_right(right)
    products = tensor.mix_products(left_projection, projection)
    if belongs is None:
        mix = solve_normal(normal, products)
    else:
        normal, products = belongs @ normal @ belongs.T, products @ belongs.T
        energy = normal.diagonal()
        scale = energy.masked_fill(energy <= 0, 1).rsqrt()
        solved = solve_normal(scale[:, None] * normal * scale, products * scale) * scale
        mix = torch.where(energy > 0, solved, mix)  # a block without terms has no equation: its column is unchanged
    square = tensor.square + float((mix * (mix @ normal - 2 * products)).sum())
    return left, right, mix, projection, square


def starting_terms(tensor: FactoredTensor, rank: int, start: str | Canonical, seed: int) -> Canonical:
    """Returns the requested start; a decomposition is returned as it is."""
    largest = len(tensor.left) * tensor.slice_rank
    if not 1 <= rank <= largest:
        raise InvalidInput(f"rank={rank}: give 1 to {largest}, where every slice of this tensor is exact.")
    if isinstance(start, Canonical):
        return start
    if start == "water_filling":
        return water_filled(tensor, rank)
    if start == "random":
        generator = torch.Generator().manual_seed(seed)
        # Drawn on the CPU in float64, so that every device starts from the same terms.
        samples = (torch.randn(size, rank, dtype=torch.float64, generator=generator) for size in tensor.shape)
        left, right, mix = (factor.to(tensor.left.device) for factor in samples)
        return Canonical(left, right, mix)
    raise UnknownName("start", start, STARTS)


def error_of(tensor: FactoredTensor, factors: Factors, square: float) -> float:
    """Returns the relative error for a squared residual; recomputes it if rounding dominates the residual."""
    if square > _NEARLY_EXACT**2 * tensor.square:
        return (square / tensor.square) ** 0.5
    return tensor.relative_error(*factors)
