"""The error-preserving correction: the same error, at a sensitivity that is never higher."""

from itertools import pairwise

import pytest
import torch
from scipy.optimize import minimize

from attnrx_lab.decompositions import FactoredTensor, als, epc, least_sensitivity
from attnrx_lab.decompositions.canonical import bounded_update
from support.sensitivities import term_sensitivity


def heads(slices: int = 4, inner: int = 5, rows: int = 11, columns: int = 10, seed: int = 0) -> FactoredTensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(slices, inner, size, generator=generator) for size in (rows, columns))
    return FactoredTensor(left, right)


def collinear() -> FactoredTensor:
    """Rank 4 in 6 x 6 x 6, the columns of every factor nearly parallel: least squares finds terms that cancel."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    left, right, mix = (drawn(6, 1) + 0.2 * drawn(6, 4) for _ in range(3))
    return FactoredTensor((left[None] * mix[:, None]).mT, right.T.expand(6, 4, 6))


def test_collinear_terms_become_far_less_sensitive_at_the_same_error() -> None:
    tensor = collinear()
    start = als(tensor, 5, start="random", sweeps=50, tolerance=0.0)
    found = epc(tensor, start, sweeps=100)
    assert tensor.relative_error(*found.factors) <= start.errors[-1] * (1 + 1e-9)
    assert term_sensitivity(found) <= least_sensitivity(start) / 5
    assert found.strength.max() <= start.strength.max() / 5
    # From there least squares gets further too.
    onwards, instead = (als(tensor, 5, start=terms, sweeps=100, tolerance=0.0) for terms in (found, start))
    assert onwards.errors[-1] < instead.errors[-1]


@pytest.mark.parametrize("rank", [1, 4, 9, 16])
@pytest.mark.parametrize("seed", range(2))
def test_the_bound_is_kept_and_the_objective_never_goes_up(seed: int, rank: int) -> None:
    tensor = heads(seed=seed)
    start = als(tensor, rank, start="random", sweeps=5, seed=seed)
    bound = start.errors[-1] * (1 + 1e-9)
    found = epc(tensor, start, sweeps=30)
    assert tensor.relative_error(*found.factors) <= bound
    assert max(found.errors) <= bound
    objectives = [least_sensitivity(epc(tensor, start, sweeps=sweeps)) for sweeps in range(6)]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(objectives))
    assert objectives[0] == pytest.approx(least_sensitivity(start), rel=1e-10)
    assert least_sensitivity(found) < objectives[0]
    assert term_sensitivity(found) == pytest.approx(least_sensitivity(found), rel=1e-10)  # balanced
    assert found.errors[-1] == pytest.approx(tensor.relative_error(*found.factors), rel=1e-8)


def test_one_update_is_the_bounded_least_squares_solution() -> None:
    """Against a general solver: the same objective, and the constraint active."""
    design, target = torch.randn(20, 3), torch.randn(20, 4)
    weights = torch.tensor([0.5, 1.0, 3.0])
    normal, products, square = design.T @ design, target.T @ design, float(target.square().sum())
    least = float((target - design @ torch.linalg.lstsq(design, target).solution).square().sum())
    bound = least + 0.3 * (square - least)

    def residual(flat) -> float:
        rows = torch.as_tensor(flat).view(4, 3)
        return square - float(2 * (rows * products).sum() - (rows @ normal * rows).sum())

    found = bounded_update(normal, products, weights, square, bound)
    assert residual(found.flatten()) == pytest.approx(bound, rel=1e-11)
    assert residual(found.flatten()) <= bound
    expected = minimize(
        lambda flat: float((torch.as_tensor(flat).view(4, 3).square() * weights).sum()),
        (products @ torch.linalg.inv(normal)).flatten().numpy(),
        method="SLSQP",
        constraints={"type": "ineq", "fun": lambda flat: bound - residual(flat)},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert float((found.square() * weights).sum()) == pytest.approx(expected.fun, rel=1e-7)
