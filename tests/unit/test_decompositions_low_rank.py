"""Two factors for a matrix: Eckart and Young's law in every metric, exactness at full rank, and the baselines."""

from collections.abc import Callable

import pytest
import torch

from attnrx.change.decompositions import GRAM_BLOCK, activation_aware, break_even_rank, gram, output_pca, pays
from attnrx.support.shapes import Tensor
from attnrx_lab.baselines.factoring import LowRank, asvd, fwsvd, svd, svd_llm

SHAPES = [(6, 10), (10, 6)]


class Case:
    """A map with data: inputs of a low dimension and a mean, some of them dead, where `deficient`."""

    def __init__(self, outputs: int, inputs: int, *, deficient: bool = False):
        self.weight = torch.randn(outputs, inputs)
        self.fixed = torch.randn(outputs)
        mixing = torch.randn(3 if deficient else 60, inputs)
        self.inputs = torch.randn(300, mixing.shape[0]) @ mixing + 2 * torch.randn(inputs)
        if deficient:
            self.inputs[:, 0] = 0.0
        self.outputs = self.inputs @ self.weight.T + self.fixed
        self.mean = self.inputs.mean(0)
        self.moment = self.inputs.T @ self.inputs / 300
        self.output_mean = self.outputs.mean(0)
        moved = self.outputs - self.output_mean
        self.covariance = moved.T @ moved / 300
        self.fisher = torch.rand(outputs, inputs) ** 3
        if deficient:
            self.fisher[1] = 0.0
            self.fisher[:, 2] = 0.0


METHODS: dict[str, Callable[[Case], LowRank]] = {
    "plain": lambda case: svd(case.weight, case.fixed),
    "moment": lambda case: LowRank.of(case.weight, case.fixed, activation_aware(case.weight, case.moment)),
    "outputs": lambda case: LowRank.of(case.weight, case.fixed, output_pca(case.weight, case.covariance)),
    "asvd": lambda case: asvd(case.weight, case.fixed, case.inputs.abs().mean(0)),
    "fwsvd outputs": lambda case: fwsvd(case.weight, case.fixed, case.fisher, side="outputs"),
    "fwsvd inputs": lambda case: fwsvd(case.weight, case.fixed, case.fisher),
    "svd-llm": lambda case: svd_llm(case.weight, case.fixed, case.moment),
}


def applied(low_rank: LowRank, inputs: Tensor) -> Tensor:
    assert low_rank.bias is not None
    return inputs @ low_rank.weight.T + low_rank.bias


def error(case: Case, low_rank: LowRank, method: str) -> float:
    """The squared error of two factors in the metric that the method says it makes least."""
    if method in ("moment", "outputs", "svd-llm"):
        missed = applied(low_rank, case.inputs) - case.outputs
        if method == "outputs":  # about the mean
            missed = missed - missed.mean(0)
        return float(missed.square().sum(1).mean())
    missed = case.weight - low_rank.weight
    if method == "asvd":
        missed = missed * case.inputs.abs().mean(0).sqrt()
    if method == "fwsvd outputs":
        missed = missed * case.fisher.sum(1).sqrt()[:, None]
    if method == "fwsvd inputs":
        missed = missed * case.fisher.sum(0).sqrt()
    return float(missed.square().sum())


# Whitening divides by what was never seen, so SVD-LLM makes no promise there.
ANY_DATA = [
    (name, deficient) for name in METHODS for deficient in (False, True) if (name, deficient) != ("svd-llm", True)
]


@pytest.mark.parametrize(("method", "deficient"), ANY_DATA)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_is_the_original_for_any_input(method: str, shape: tuple[int, int], deficient: bool):
    case = Case(*shape, deficient=deficient)
    whole = METHODS[method](case)
    assert whole.rank == min(shape)
    rounding = 1e-11 if method == "svd-llm" else 1e-12
    assert (whole.weight - case.weight).abs().max() <= rounding * case.weight.abs().max()
    assert whole.bias is not None and (whole.bias - case.fixed).abs().max() <= 1e-11


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_error_is_the_energy_left_out(method: str, shape: tuple[int, int]):
    case = Case(*shape)
    whole = METHODS[method](case)
    assert whole.strength.shape == (min(shape),) and bool((whole.strength.diff() <= 0).all())
    for rank in range(min(shape) + 1):
        expected = float(whole.strength[rank:].square().sum())
        total = float(whole.strength.square().sum())
        assert error(case, whole.truncated(rank), method) == pytest.approx(expected, rel=1e-9, abs=1e-12 * total)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["moment", "outputs"])
def test_error_is_the_energy_left_out_where_the_data_is_deficient(method: str, shape: tuple[int, int]):
    case = Case(*shape, deficient=True)
    whole = METHODS[method](case)
    seen = 4 if method == "moment" else 3
    assert int((whole.strength > 1e-6 * whole.strength[0]).sum()) == seen
    for rank in range(min(shape) + 1):
        expected = float(whole.strength[rank:].square().sum())
        total = float(whole.strength.square().sum())
        assert error(case, whole.truncated(rank), method) == pytest.approx(expected, rel=1e-9, abs=1e-12 * total)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_no_other_factors_of_the_same_rank_are_nearer(method: str, shape: tuple[int, int], rank: int):
    case = Case(*shape)
    best = METHODS[method](case).truncated(rank)
    least = error(case, best, method)
    assert best.bias is not None
    for size in (1e-3, 1e-2, 1e-1, 1.0):
        for _ in range(10):
            first = best.first + size * torch.randn_like(best.first)
            second = best.second + size * torch.randn_like(best.second)
            assert error(case, LowRank(first, second, best.strength, best.bias), method) >= least * (1 - 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_whitening_by_cholesky_is_the_activation_aware_optimum(shape: tuple[int, int]):
    case = Case(*shape)
    whitened, aware = METHODS["svd-llm"](case), METHODS["moment"](case)
    assert torch.allclose(whitened.strength, aware.strength, rtol=1e-8)
    for rank in range(min(shape) + 1):
        assert torch.allclose(whitened.truncated(rank).weight, aware.truncated(rank).weight, atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_strengths_that_are_rounding_are_zero(shape: tuple[int, int], mean: float):
    outputs, inputs = shape
    data = torch.randn(300, 3) @ torch.randn(3, inputs) + mean
    weight, centred = torch.randn(outputs, inputs), data - data.mean(0)
    strength, _ = activation_aware(weight, centred.T @ centred / 300)
    assert bool((strength[:3] > 1e-3).all()) and bool((strength[3:] == 0).all())


@pytest.mark.parametrize(("outputs", "inputs", "rank", "expected"), [(768, 3072, 614, True), (768, 3072, 615, False)])
def test_two_factors_pay_below_the_break_even_rank(outputs: int, inputs: int, rank: int, expected: bool):
    assert break_even_rank(outputs, inputs) == pytest.approx(614.4)
    assert pays(rank, outputs, inputs) is expected
    assert (rank * (outputs + inputs) < outputs * inputs) is expected


@pytest.mark.parametrize("features", [1, 2 * GRAM_BLOCK - 1, 2 * GRAM_BLOCK, 2 * GRAM_BLOCK + 1, 3 * GRAM_BLOCK + 5])
def test_a_gram_by_blocks_is_the_product(features: int) -> None:
    rows = torch.randn(7, features, dtype=torch.float64)
    torch.testing.assert_close(gram(rows), rows.T @ rows, rtol=1e-12, atol=1e-12)
