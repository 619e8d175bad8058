"""Row normalization: right, differentiable, safe at zero and in half precision."""

import pytest
import torch

from attnrx_lab.svda_attention import unit_rows


def test_rows_have_unit_length_and_keep_their_direction() -> None:
    rows = torch.randn(3, 4, 5)
    unit = unit_rows(rows)
    torch.testing.assert_close(unit, rows / rows.norm(dim=-1, keepdim=True))


def test_gradients_agree_with_finite_differences() -> None:
    rows = torch.randn(2, 3, 4, requires_grad=True)
    assert torch.autograd.gradcheck(unit_rows, (rows,))


def test_training_and_inference_give_the_same_bits() -> None:
    rows = torch.randn(2, 3, 4, requires_grad=True)
    with torch.no_grad():
        inference = unit_rows(rows)
    assert torch.equal(unit_rows(rows), inference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_zero_rows_stay_zero_and_get_no_gradient(dtype: torch.dtype) -> None:
    rows = torch.zeros(2, 4, dtype=dtype)
    rows[0] = 1
    rows.requires_grad_()
    unit = unit_rows(rows)
    unit.sum().backward()
    assert rows.grad is not None
    assert torch.isfinite(unit).all() and torch.isfinite(rows.grad).all()
    assert not unit[1].any() and not rows.grad[1].any()


@pytest.mark.parametrize("size", [1e-4, 3e4])
def test_float16_rows_neither_overflow_nor_vanish(size: float) -> None:
    rows = torch.full((1, 64), size, dtype=torch.float16)
    torch.testing.assert_close(unit_rows(rows).double(), torch.full((1, 64), 0.125), rtol=2e-3, atol=0)
