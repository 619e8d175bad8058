"""The statistics against scipy, and on cases whose answer is known."""

import math
import runpy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from attnrx.show.checks import statistics as own
from attnrx.support.errors import InvalidInput
from attnrx.vit.costs.measured import PROCESSES
from attnrx_lab.comparison.comparing import holm, sign_flip_test
from attnrx_lab.papers.table import crossed_interval, t_interval


@cache
def coverage() -> dict[str, Any]:
    """The simulations of benchmarks/coverage.py."""
    return runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage.py"))


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (0, 1), (3, 3), (1, 9), (40, 60), (700, 800), (12000, 12500)])
def test_mcnemar_is_the_exact_binomial_test(lost: int, gained: int):
    expected = stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert own.mcnemar(lost, gained) == pytest.approx(expected, rel=1e-7)


def test_t_interval():
    values = [70.1, 71.3, 69.8]
    found = t_interval(values)
    low, high = stats.t.interval(0.95, 2, loc=sum(values) / 3, scale=stats.sem(values))
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    with pytest.raises(InvalidInput, match="at least two"):
        t_interval([1.0])


@pytest.mark.parametrize(("successes", "n"), [(0, 7), (7, 7), (3, 10), (9000, 10000)])
def test_proportion_is_wilsons(successes: int, n: int):
    found = own.proportion(successes, n)
    expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
    assert (found.low, found.high) == (pytest.approx(expected.low, abs=1e-12), pytest.approx(expected.high, abs=1e-12))
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("least", [-math.inf, 0.0])
def test_the_studentized_interval_divides_every_resample_by_its_own_error(least: float) -> None:
    """Every resample by itself, with numpy, and with the resamples that `resampled_means` draws."""
    values = torch.rand(40, generator=torch.Generator().manual_seed(0)).double() ** 6
    n, draws = len(values), own.DRAWS
    chosen = torch.randint(n, (draws, n), generator=torch.Generator().manual_seed(5))
    means, errors = values[chosen].mean(1), values[chosen].std(1, correction=0)
    tail = own.TAIL * n / (n + own.SHORT)
    quotients = (means - values.mean()) / errors
    ends = values.mean() - values.std(correction=0) * torch.quantile(quotients, torch.tensor([1 - tail, tail]))
    found = own.studentized(values[:, None], lambda sums: sums[..., 0], 5, least)
    assert (found.low, found.high) == pytest.approx((max(least, float(ends[0])), float(ends[1])))


def test_the_studentized_interval_of_a_ratio_is_that_of_its_linearization() -> None:
    """For many images, where both are the normal interval of the delta method."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(5000, 2, generator=generator).double() + torch.tensor([1.0, 2.0])
    found = own.studentized(values, lambda means: means[..., 0] / means[..., 1], 0)
    ratio = float(values[:, 0].sum() / values[:, 1].sum())
    residual = (values[:, 0] - ratio * values[:, 1]) / values[:, 1].mean()
    half = 1.96 * float(residual.std()) / math.sqrt(len(values))
    assert found.value == pytest.approx(ratio)
    assert (found.high - ratio, ratio - found.low) == pytest.approx((half, half), rel=0.1)


def test_a_mean_of_few_or_equal_images_has_a_finite_interval() -> None:
    for n in (1, 2, 3, 7):
        found = own.mean_estimate(torch.rand(n, generator=torch.Generator().manual_seed(n)), 0)
        assert 0 <= found.low <= found.value <= found.high < math.inf
    assert own.mean_estimate(torch.zeros(9), 0) == own.Estimate(0.0, 0.0, 0.0)


LATENCY = pytest.param(50, 0.7, id="50"), pytest.param(100, 0.8, id="100", marks=pytest.mark.slow)


@pytest.mark.parametrize(("rounds", "phi"), LATENCY)
def test_the_interval_of_one_run_covers_its_speed_when_rounds_are_correlated(rounds: int, phi: float) -> None:
    """AR(1) noise, drift and disturbed rounds; a bootstrap of single rounds covers it in 60 to 70 %."""
    covered, _ = coverage()["covers_ratio"](rounds, phi, 1, 400, between=0.0)
    assert covered >= 0.92


@pytest.mark.parametrize("rounds", [16, pytest.param(50, marks=pytest.mark.slow)])
def test_the_interval_over_processes_covers_a_speed_whatever_the_rounds_depend_on(rounds: int) -> None:
    """Where processes differ as well, and the interval of one run covers the ratio in 80 to 90 %."""
    covered, _ = coverage()["covers_ratio"](rounds, 0.9, PROCESSES, 400)
    assert covered >= 0.92


MEANS = [(name, n) for name in coverage()["DIVERGENCES"] for n in (50, 200)]
QUICK = {("lognormal 1", 50), ("gammas, 10 % 24-fold", 50)}


@pytest.mark.parametrize(
    ("name", "n"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in MEANS]
)
def test_the_interval_of_a_mean_divergence_covers_it(name: str, n: int) -> None:
    repetitions = 150 if (name, n) in QUICK else 300
    studentized, percentiles = coverage()["covers_mean"](coverage()["DIVERGENCES"][name], n, repetitions)
    assert studentized >= 0.92 and studentized >= percentiles


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "10 %" in name else pytest.mark.slow) for name in coverage()["DIVERGENCES"]]
)
def test_twice_the_promised_divergence_holds_in_at_most_5_percent(name: str) -> None:
    for n in (20, 50):
        outcomes = coverage()["kept_promises"](coverage()["DIVERGENCES"][name], n, 2.0, 60)
        assert outcomes["holds"] <= 0.05
    kept = coverage()["kept_promises"](coverage()["DIVERGENCES"][name], 1000, 1.0, 15)
    assert kept["undecided"] <= 0.2 and kept["holds"] >= 0.5


def test_the_interval_of_a_paired_change_covers_the_truth():
    """Of 300 experiments in which the candidate truly loses 4 points, about 95 % cover it."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(300):
        chance = torch.rand(200, generator=generator)
        before = chance < 0.7
        after = before & ~((chance > 0.2) & (chance < 0.3)) | (chance > 0.94)
        found = own.paired_change(before, after, seed)
        covered += found.low <= -0.04 <= found.high
    assert 0.92 <= covered / 300 <= 0.985


def test_no_change_on_few_images_is_not_certainty():
    correct = torch.ones(20, dtype=torch.bool)
    few, many = (own.paired_change(same, same, 0) for same in (correct, correct.repeat(500)))
    assert few.value == many.value == 0
    assert few.low < -0.02
    assert many.low > -0.001


def test_the_change_of_a_metric_that_few_images_change_covers_the_truth() -> None:
    """Shares of two objects, one object lost in 1 % of 100 images: without an error of its own where none is."""
    generator, covered = torch.Generator().manual_seed(0), 0
    for seed in range(60):
        before = torch.randint(1, 3, (100,), generator=generator) / 2
        after = before - 0.5 * (torch.rand(100, generator=generator) < 0.01)
        found = own.metric_change(before, after, seed)
        assert found.low < found.value < found.high
        covered += found.low <= -0.005 <= found.high
    assert covered >= 54
    same, change = torch.ones(50) / 2, torch.randn(50, generator=generator)
    same[:25] = 1.0
    assert own.metric_change(same, same, 0).high > 0.005
    assert own.metric_change(same, same + change, 0) == own.mean_estimate((same + change - same).double(), 0)


def test_calibration_error_against_the_definition():
    confidence, correct = torch.rand(500), torch.rand(500) < 0.5
    expected = 0.0
    for index in range(15):
        inside = (confidence > index / 15) & (confidence <= (index + 1) / 15)
        if inside.any():
            gap = confidence[inside].mean() - correct[inside].double().mean()
            expected += float(inside.double().mean() * gap.abs())
    gaps = own.calibration_gaps(confidence, correct, bins=15)
    assert float(own.calibration_error(gaps.mean(0))) == pytest.approx(expected)


@pytest.mark.parametrize(("overconfidence", "images"), [(0.0, 400), (0.05, 60), (0.15, 60)])
def test_the_interval_of_the_calibration_error_covers_the_truth_and_contains_its_value(
    overconfidence: float, images: int
) -> None:
    """In at least 90 % of 60 experiments, for calibrated models, whose error is 0, and for others."""
    covered, bins = 0, 15
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        confidence = 0.2 + 0.8 * torch.rand(images, generator=generator).double()
        correct = torch.rand(images, generator=generator).double() < confidence - overconfidence
        gaps = own.calibration_gaps(confidence, correct, bins)
        found = own.calibration_interval(gaps.mean(0), own.resampled_means(gaps, seed))
        assert found.value == pytest.approx(float(own.calibration_error(gaps.mean(0))))
        assert 0 <= found.low <= found.value <= found.high <= 1
        covered += found.low <= overconfidence <= found.high
    assert covered >= 54


@pytest.mark.parametrize("shift", [-0.5, 0.0, 0.5])
def test_the_interval_of_a_biased_change_contains_its_value_and_its_correction(shift: float) -> None:
    samples = 1 + shift + 0.01 * torch.randn(2000, generator=torch.Generator().manual_seed(0)).double()
    found = own.biased_change(1.0, samples)
    assert found.low <= 1 - max(0.0, shift) and found.high >= 1 - min(0.0, shift)
    assert found.high - found.low < abs(shift) + 0.06


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 1.0])
def test_the_interval_of_a_mean_share_covers_the_truth_and_is_no_point(share: float) -> None:
    covered = 0
    for seed in range(100):
        right = (torch.rand(60, generator=torch.Generator().manual_seed(seed)) < share).double()
        found = own.mean_share(right, seed)
        assert found.low <= found.value <= found.high and 0.01 < found.high - found.low < 0.3
        covered += found.low <= share <= found.high
    assert covered >= 90


def test_holm_matches_its_definition() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx((0.03, 0.06, 0.06))
    assert holm([0.5, 0.9]) == pytest.approx((1.0, 1.0))
    assert holm([]) == ()


def test_the_sign_flip_test_matches_all_swaps() -> None:
    values = torch.tensor([0.3, -0.1, 0.4, 0.2, 0.5, -0.05, 0.1, 0.6])
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(values))))
    exact = float(((signs @ values).abs() >= values.sum().abs() - 1e-12).double().mean())
    assert sign_flip_test(values, 0) == pytest.approx(exact, abs=3 * (exact / 9999) ** 0.5)
    assert sign_flip_test(values, 0) == sign_flip_test(-values, 0)
    assert sign_flip_test(torch.zeros(5), 0) == 1.0


def test_the_interval_over_runs_and_groups_matches_the_analysis_of_variance() -> None:
    values = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 9.0]])
    # Mean squares: runs 6 (one degree), groups 18.5, residual 0.5; so 24 / 6 = 4 with 24^2 / 6^2 = 16 degrees.
    found = crossed_interval(values)
    half = stats.t.ppf(0.975, 16) * 2.0
    assert (found.value, found.low, found.high) == pytest.approx((4.0, 4.0 - half, 4.0 + half))
    alone = crossed_interval(values[:1])
    assert (alone.low, alone.high) == pytest.approx(stats.t.interval(0.95, 2, 3.0, stats.sem([1.0, 2.0, 6.0])))


def test_the_interval_over_runs_and_groups_covers_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(300):
        runs, groups = (torch.randn(shape, generator=generator) for shape in ((5, 1), (1, 60)))
        found = crossed_interval(0.3 * runs + groups + torch.randn(5, 60, generator=generator))
        covered += found.low <= 0 <= found.high
    assert covered / 300 == pytest.approx(0.95, abs=0.03)
