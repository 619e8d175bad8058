"""Products, norms and errors of a factored tensor, against the tensor formed in full."""

import pytest
import torch

from attnrx_lab.decompositions import FactoredTensor

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
