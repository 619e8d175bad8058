"""Products, norms and errors of a factored tensor, against the tensor formed in full."""

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx_lab.decompositions import FactoredTensor
from attnrx_lab.decompositions.factored import solve_normal, unit_columns

# slices, inner, rows, columns, rank: rows = columns + 1 is a bias row, inner > rows a slice of full rank
SHAPES = [(3, 4, 10, 9, 5), (2, 6, 5, 4, 7), (1, 1, 3, 3, 1), (4, 2, 6, 8, 12)]


def drawn(slices: int, inner: int, rows: int, columns: int, rank: int) -> tuple[FactoredTensor, list[torch.Tensor]]:
    tensor = FactoredTensor(torch.randn(slices, inner, rows), torch.randn(slices, inner, columns))
    return tensor, [torch.randn(size, rank) for size in (rows, columns, slices)]


def close(actual: torch.Tensor, expected: torch.Tensor, limit: float = 1e-12) -> bool:
    return bool((actual - expected).norm() <= limit * expected.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_formed_tensor(shape: tuple[int, ...]) -> None:
    tensor, (left, right, mix) = drawn(*shape)
    dense, on_left, on_right = tensor.dense(), tensor.project_left(left), tensor.project_right(right)
    assert close(tensor.left_products(on_right, mix), torch.einsum("ijh,jr,hr->ir", dense, right, mix))
    assert close(tensor.right_products(on_left, mix), torch.einsum("ijh,ir,hr->jr", dense, left, mix))
    assert close(tensor.mix_products(on_left, on_right), torch.einsum("ijh,ir,jr->hr", dense, left, right))
    terms = torch.einsum("ir,jr,hr->ijh", left, right, mix)
    assert tensor.norm == pytest.approx(float(dense.norm()), rel=1e-12)
    assert tensor.shape == dense.shape
    expected = float((dense - terms).norm() / dense.norm())
    assert tensor.relative_error(left, right, mix) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_are_those_of_the_formed_slices(shape: tuple[int, ...]) -> None:
    tensor, _ = drawn(*shape)
    left, strength, right = tensor.svd()
    dense = tensor.dense().permute(2, 0, 1)
    expected = torch.linalg.svdvals(dense)[:, : strength.shape[1]]
    assert close(strength, expected)
    assert close(left * strength[:, None] @ right.mT, dense)
    for basis in (left, right):
        assert close(basis.mT @ basis, torch.eye(strength.shape[1]).expand(len(basis), -1, -1))


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-10])
def test_small_errors_keep_their_digits(size: float) -> None:
    tensor, _ = drawn(3, 4, 10, 9, 1)
    noise = torch.randn(3, 4, 10)
    near = FactoredTensor(tensor.left + size * noise, tensor.right)
    factors = tensor.left.flatten(0, 1).T, tensor.right.flatten(0, 1).T, torch.eye(3).repeat_interleave(4, 1)
    expected = size * FactoredTensor(noise, tensor.right).norm / near.norm
    assert near.relative_error(*factors) == pytest.approx(expected, rel=1e-4)
    assert tensor.relative_error(*factors) <= 1e-14


def test_rows_of_zeros_make_ragged_slices() -> None:
    tensor, (left, right, mix) = drawn(3, 4, 10, 9, 5)
    padded = FactoredTensor(
        torch.cat([tensor.left, torch.zeros(3, 2, 10)], 1), torch.cat([tensor.right, torch.randn(3, 2, 9)], 1)
    )
    assert padded.relative_error(left, right, mix) == pytest.approx(tensor.relative_error(left, right, mix), rel=1e-12)
    assert close(padded.svd()[1][:, :4], tensor.svd()[1])


def test_a_tensor_of_zeros_has_an_error_all_the_same() -> None:
    tensor = FactoredTensor(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    zeros = torch.zeros(4, 2), torch.zeros(5, 2), torch.zeros(2, 2)
    ones = torch.ones(4, 2), torch.ones(5, 2), torch.ones(2, 2)
    assert tensor.norm == 0
    assert tensor.relative_error(*zeros) == 0
    assert tensor.relative_error(*ones) == float("inf")


def test_parameters_in_half_precision_become_plain_float64() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 3, 4, dtype=torch.float32))
    tensor = FactoredTensor(weight, weight.bfloat16())
    assert tensor.left.dtype == tensor.right.dtype == torch.float64
    assert not tensor.left.requires_grad


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        (torch.ones(2, 0, 4), torch.ones(2, 0, 4), "empty"),
        (torch.full((2, 3, 4), torch.nan), torch.ones(2, 3, 4), "not finite"),
        (torch.ones(2, 3, 4), torch.full((2, 3, 4), torch.inf), "not finite"),
    ],
)
def test_factors_that_cannot_be_right_are_refused(left: torch.Tensor, right: torch.Tensor, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        FactoredTensor(left, right)


def test_a_normal_matrix_is_solved_whether_it_is_definite_or_not() -> None:
    rows, products = torch.randn(8, 5), torch.randn(3, 5)
    definite = rows.T @ rows / 8
    assert close(solve_normal(definite, products) @ definite, products)
    repeated = rows[:, [0, 1, 2, 0, 1]]
    semidefinite, reachable = repeated.T @ repeated / 8, torch.randn(3, 8) @ repeated
    solved = solve_normal(semidefinite, reachable)
    assert close(solved @ semidefinite, reachable, 1e-10)
    assert close(solved, reachable @ torch.linalg.pinv(semidefinite, rtol=1e-10, hermitian=True), 1e-8)
    assert not solve_normal(torch.zeros(4, 4), torch.zeros(2, 4)).any()


def test_columns_of_zeros_have_no_direction() -> None:
    matrix = torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    unit, length = unit_columns(matrix)
    assert unit.tolist() == [[0.6, 0.0], [0.8, 0.0]]
    assert length.tolist() == [5.0, 0.0]
