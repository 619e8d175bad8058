"""The error-preserving correction: the same error, at a sensitivity that is never higher."""

from itertools import pairwise

import pytest
import torch
from scipy.optimize import minimize

from attnrx_lab.decompositions import Canonical, FactoredTensor, als, cpd_epc, epc, least_sensitivity
from attnrx_lab.decompositions.canonical import bounded_update, column_sensitivity
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


def test_one_update_at_the_edges() -> None:
    design, target, weights = torch.randn(20, 3), torch.randn(20, 4), torch.ones(3)
    normal, products, square = design.T @ design, target.T @ design, float(target.square().sum())
    least = products @ torch.linalg.inv(normal)
    torch.testing.assert_close(bounded_update(normal, products, weights, square, 0.0), least)
    assert not bounded_update(normal, products, weights, square, square).any()
    near = bounded_update(normal, products, weights, square, square * (1 - 1e-9))
    assert 0 < near.norm() < 1e-6
    # A term that the others do not see costs nothing, and is not used.
    silent = torch.nn.functional.pad(normal, (0, 1, 0, 1))
    padded = torch.nn.functional.pad(products, (0, 1))
    found = bounded_update(silent, padded, torch.tensor([1.0, 1.0, 1.0, 0.0]), square, 0.5 * square)
    expected = bounded_update(normal, products, weights, square, 0.5 * square)
    torch.testing.assert_close(found, torch.nn.functional.pad(expected, (0, 1)))


def test_a_start_with_an_empty_term_keeps_it_empty() -> None:
    tensor, start = heads(), als(heads(), 4, start="random", sweeps=5)
    left, right, mix = (torch.nn.functional.pad(factor, (0, 1)) for factor in start.factors)
    silent = Canonical(left, right, mix)
    found = epc(tensor, silent, sweeps=5)
    assert not found.strength[4] and bool(torch.isfinite(found.strength).all())
    assert least_sensitivity(found) < least_sensitivity(silent)


def test_errors_that_rounding_hides_may_rise_to_the_smallest_bound() -> None:
    tensor = heads()
    exact = als(tensor, 20)
    assert exact.errors[-1] < 1e-12
    assert epc(tensor, exact, sweeps=3).errors[-1] <= 1e-6 * (1 + 1e-9)


@pytest.mark.parametrize("finish", [False, True])
def test_least_squares_gets_further_through_a_correction(finish: bool) -> None:
    tensor = collinear()
    alone = als(tensor, 5, start="random", sweeps=100, tolerance=0.0)
    found = cpd_epc(tensor, 5, start="random", sweeps=50, finish=finish)
    assert tensor.relative_error(*found.factors) < alone.errors[-1]


def test_a_last_correction_lowers_the_sensitivity_and_not_the_error() -> None:
    tensor = collinear()
    without, corrected = (cpd_epc(tensor, 5, sweeps=20, finish=finish) for finish in (False, True))
    assert term_sensitivity(corrected) < least_sensitivity(without)
    assert corrected.errors[-1] <= without.errors[-1] * (1 + 1e-9)


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again = (cpd_epc(heads(), 5, start="random", sweeps=10, seed=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.factors, again.factors, strict=True))


def test_weights_of_columns_are_how_the_objective_grows_with_them() -> None:
    left, right, mix = drawn = [torch.randn(size, 3) for size in (7, 5, 4)]
    before = term_sensitivity(Canonical(left, right, mix))
    for mode in range(3):
        others = [factor for other, factor in enumerate(drawn) if other != mode]
        left, right, mix = (2 * factor if mode == other else factor for other, factor in enumerate(drawn))
        growth = 3 * float((drawn[mode].square() * column_sensitivity(*others)).sum())
        assert term_sensitivity(Canonical(left, right, mix)) - before == pytest.approx(growth, rel=1e-12)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 2e-6])
def test_small_bounds_are_kept_too(size: float) -> None:
    """Where the squared error has few digits left, and least squares has nothing more to gain."""
    terms = als(heads(), 6, start="random", sweeps=2)
    exact = FactoredTensor((terms.left[None] * terms.mix[:, None]).mT, terms.right.T.expand(4, 6, 10))
    noise = torch.randn(4, 6, 11) * size * exact.left.norm() / 264**0.5
    tensor = FactoredTensor(exact.left + noise, exact.right)
    for sweeps in 0, 200:
        start = als(tensor, 6, start=terms, sweeps=sweeps)
        found = epc(tensor, start, sweeps=20)
        assert tensor.relative_error(*found.factors) <= tensor.relative_error(*start.factors) * (1 + 1e-9)
        assert least_sensitivity(found) <= least_sensitivity(start) * (1 + 1e-13)
