"""Alternating least squares, its starts, and the sensitivity of what it finds."""

import math
from itertools import pairwise

import pytest
import torch

from attnrx_lab.decompositions import Canonical, FactoredTensor, als, cpd_epc, least_sensitivity, water_filled
from support.sensitivities import term_sensitivity


def heads(slices: int = 3, inner: int = 4, rows: int = 10, columns: int = 9, seed: int = 0) -> FactoredTensor:
    generator = torch.Generator().manual_seed(seed)
    falling = torch.exp(-0.3 * torch.arange(inner))[:, None]
    left = torch.randn(slices, inner, rows, generator=generator) * falling
    return FactoredTensor(left, torch.randn(slices, inner, columns, generator=generator))


def terms(rows: int = 7, columns: int = 6, slices: int = 5, rank: int = 3, seed: int = 0) -> Canonical:
    generator = torch.Generator().manual_seed(seed)
    left, right, mix = (torch.randn(size, rank, generator=generator) for size in (rows, columns, slices))
    return Canonical(left, right, mix)


def unfused(tensor: FactoredTensor, start: Canonical, sweeps: int) -> torch.Tensor:
    """Plain alternating least squares on the formed tensor, with no rescaling and no normal equations."""
    dense, factors = tensor.dense(), list(start.factors)
    for _ in range(sweeps):
        for mode in range(3):
            others = [factor for other, factor in enumerate(factors) if other != mode]
            design = torch.einsum("ir,jr->ijr", *others).flatten(0, 1)
            unfolded = dense.movedim(mode, 0).flatten(1)
            factors[mode] = torch.linalg.lstsq(design, unfolded.T).solution.T
    return torch.einsum("ir,jr,hr->ijh", *factors)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_sweeps_are_those_of_the_textbook(rank: int) -> None:
    tensor, start = heads(), als(heads(), rank, start="random", sweeps=0, seed=3)
    found = als(tensor, rank, start=start, sweeps=5, tolerance=0.0)
    expected = unfused(tensor, start, 5)
    assert (found.dense() - expected).norm() <= 1e-10 * expected.norm()
    assert len(found.errors) == 6


@pytest.mark.parametrize("rank", [1, 5, 8, 12])
@pytest.mark.parametrize("start", ["best", "water_filling", "random"])
def test_the_error_never_goes_up_and_is_the_one_reported(start: str, rank: int) -> None:
    tensor = heads()
    found = als(tensor, rank, start=start, sweeps=50)
    assert all(later <= earlier for earlier, later in pairwise(found.errors))
    residual = float((tensor.dense() - found.dense()).norm()) / tensor.norm
    assert found.errors[-1] == pytest.approx(residual, rel=1e-6, abs=1e-13)
    assert found.rank == rank
    for factor in found.left, found.right:
        torch.testing.assert_close(factor.norm(dim=0), torch.ones(rank))


def test_terms_that_are_there_are_found() -> None:
    true = terms(rank=3)
    eye = torch.eye(6).expand(5, 6, 6)
    found = als(FactoredTensor(true.dense().permute(2, 1, 0), eye), 3, start="random", sweeps=500, tolerance=1e-12)
    assert found.errors[-1] <= 1e-9
    torch.testing.assert_close(found.strength.sort().values, true.strength.sort().values, rtol=1e-7, atol=0)


def test_the_water_filled_start_leaves_the_energy_of_the_weakest_triples() -> None:
    tensor = heads()
    energy = torch.linalg.svdvals(tensor.dense().permute(2, 0, 1))[:, :4].square().flatten().sort().values
    for rank in range(1, 13):
        left_out = float(energy[: 12 - rank].sum() / energy.sum())
        start = water_filled(tensor, rank)
        assert tensor.relative_error(*start.factors) == pytest.approx(math.sqrt(left_out), rel=1e-10, abs=1e-14)
        assert bool(((start.mix != 0).sum(0) == 1).all())
        assert start.strength.tolist() == sorted(start.strength.tolist(), reverse=True)


def equal_heads() -> FactoredTensor:
    """Three equal slices of rank 16: 16 terms with equal mixes are exact."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 24, generator=generator).expand(3, -1, -1) for _ in range(2))
    return FactoredTensor(left, right)


def test_equal_heads_do_not_hold_the_fit_at_a_saddle() -> None:
    tensor = equal_heads()
    stuck = als(tensor, 16, start="water_filling", sweeps=100)
    assert stuck.errors[-1] > 0.1
    assert als(tensor, 16, sweeps=100).errors[-1] < 1e-6
    assert tensor.relative_error(*cpd_epc(tensor, 16, sweeps=100).factors) < 2e-6


def test_the_sensitivity_is_the_squared_change_under_small_noise() -> None:
    found, generator, size, draws = terms(), torch.Generator().manual_seed(1), 1e-5, 6000
    noise = [torch.randn(draws, *factor.shape, generator=generator) * size for factor in found.factors]
    moved = [factor + change for factor, change in zip(found.factors, noise, strict=True)]
    change = torch.einsum("bir,bjr,bhr->bijh", *moved) - found.dense()
    measured = float(change.square().sum((1, 2, 3)).mean()) / size**2
    assert term_sensitivity(found) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_balanced_terms_are_the_same_tensor_at_least_sensitivity(seed: int) -> None:
    found = terms(seed=seed)
    balanced = found.balanced()
    torch.testing.assert_close(balanced.dense(), found.dense(), rtol=1e-12, atol=1e-12)
    assert term_sensitivity(balanced) == pytest.approx(least_sensitivity(found), rel=1e-10)
    assert term_sensitivity(balanced) < term_sensitivity(found)
    for step in (0.99, 1.01):  # any other scaling is worse
        for left, right, mix in ((step, 1 / step, 1), (1, step, 1 / step), (step, 1, 1 / step)):
            scaled = Canonical(balanced.left * left, balanced.right * right, balanced.mix * mix)
            assert term_sensitivity(scaled) > term_sensitivity(balanced)
