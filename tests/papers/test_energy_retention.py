"""Eqs. 8 and 44-45 of the SVDA paper, against literal transcriptions; and the paper's own prescription numbers."""

import itertools
import math
from fractions import Fraction

import pytest
import torch

from attnrx.decide.rules import EnergyRetention, prescribe_maps
from attnrx_lab.rules import Threshold
from support.diagnoses import diagnosis, of_strengths


def smallest_set(strengths: list[float], rho: Fraction) -> tuple[int, ...]:
    """Eq. 45 by trying every set: the smallest that reaches rho; of several the one of most energy, then by index."""
    energies = [Fraction(strength) ** 2 for strength in strengths]  # Eq. 44, exactly
    indices = range(len(strengths))
    for size in range(1, len(strengths) + 1):
        sets = itertools.combinations(indices, size)
        enough = [chosen for chosen in sets if sum(energies[r] for r in chosen) >= rho * sum(energies)]
        if enough:
            return min(enough, key=lambda chosen: (-sum(energies[r] for r in chosen), chosen))
    raise AssertionError("the full set always reaches rho")


@pytest.mark.parametrize("rho", ["0.05", "0.5", "0.85", "0.9", "0.95", "0.99"])
@pytest.mark.parametrize("seed", range(6))
def test_energy_retention_keeps_the_smallest_set(rho: str, seed: int) -> None:
    found = diagnosis(heads=3, directions=7, layers=1, seed=seed)
    keep = EnergyRetention(float(rho)).decide(found, 0).keep
    for kept, strengths in zip(keep, found.layers[0].spectrum.strength, strict=True):
        assert tuple(torch.nonzero(kept).flatten().tolist()) == smallest_set(strengths.tolist(), Fraction(rho))


@pytest.mark.parametrize("strengths", [[2.0, -1.0, 1.0, 1.0, -2.0], [1.0, 1.0, 0.0, 1.0], [3.0, 4.0], [-1.0]])
@pytest.mark.parametrize("rho", ["0.2", "0.36", "0.5", "0.64", "0.75", "1"])
def test_ties_and_exact_shares_go_by_index(strengths: list[float], rho: str) -> None:
    keep = EnergyRetention(float(rho)).decide(of_strengths(strengths), 0).keep[0]
    assert tuple(torch.nonzero(keep).flatten().tolist()) == smallest_set(strengths, Fraction(rho))


@pytest.mark.parametrize("directions", [1, 2, 3, 7, 10, 48, 64, 100])
def test_equal_strengths_keep_the_ceiling(directions: int) -> None:
    found = of_strengths([0.1] * directions, [-1e-3] * directions, [1 / 3] * directions)
    for percent in range(1, 101):
        keep = EnergyRetention(percent / 100).decide(found, 0).keep
        wanted = math.ceil(Fraction(percent, 100) * directions)
        assert keep.sum(-1).tolist() == [wanted] * 3, f"rho={percent} %"
        assert bool(keep[:, :wanted].all())


def test_rho_one_keeps_everything_that_is_not_zero() -> None:
    keep = EnergyRetention(1.0).decide(of_strengths([1.0, 0.0, 1e-12, -1e3], [0.0] * 4), 0).keep
    assert keep.tolist() == [[True, False, True, True], [True, False, False, False]]  # at least one direction stays


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_energy_is_relative(factor: float) -> None:
    found = diagnosis(layers=1)
    scaled = of_strengths(*(found.layers[0].spectrum.strength * factor).tolist())
    assert torch.equal(EnergyRetention(0.9).decide(found, 0).keep, EnergyRetention(0.9).decide(scaled, 0).keep)


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_threshold_is_equation_8(tau: float) -> None:
    found = diagnosis(layers=1)
    decision = Threshold(tau).decide(found, 0)
    for kept, given, strengths in zip(decision.keep, decision.strength, found.layers[0].spectrum.strength, strict=True):
        for r, sigma in enumerate(strengths.tolist()):
            m = 1 if abs(sigma) >= tau else 0
            assert bool(kept[r]) == (m == 1)
            assert given[r].item() == m * sigma  # Eq. 9


def test_a_strength_equal_to_the_threshold_stays() -> None:
    assert Threshold(0.5).decide(of_strengths([0.5, -0.5, 0.4999999]), 0).keep.tolist() == [[True, True, False]]


def test_pruned_share_falls_with_rho() -> None:
    """Table 2: a lower rho removes more."""
    found = diagnosis(heads=4, directions=64, layers=4)
    shares = [prescribe_maps(found, EnergyRetention(rho)).removed_share for rho in (0.85, 0.90, 0.95)]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 3
