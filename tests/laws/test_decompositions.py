"""A larger family of decompositions that starts from a smaller one is never worse, whatever the tensor."""

import pytest
import torch

from attnrx_lab.decompositions import (
    BlockTerms,
    Canonical,
    FactoredTensor,
    als,
    epc,
    fusion_ranks,
    initial_blocks,
    water_filled,
)
from support.sensitivities import term_sensitivity


def drawn(kind: str, seed: int) -> FactoredTensor:
    """Four slices of rank 6, in a space of 15 x 14 dimensions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    left, right = normal(4, 6, 15), normal(4, 6, 14)
    if kind == "shared":  # all slices live in the same few directions
        left, right = normal(4, 6, 7) @ normal(7, 15), normal(4, 6, 7) @ normal(7, 14)
    if kind == "uneven":
        falling = torch.exp(-0.4 * torch.arange(6))[:, None]
        left = left * torch.tensor([0.1, 0.5, 1.0, 2.0])[:, None, None] * falling
    if kind == "ragged":
        left[torch.arange(6)[None] >= torch.tensor([1, 3, 5, 6])[:, None]] = 0
    return FactoredTensor(left, right)


def error(tensor: FactoredTensor, found: BlockTerms | Canonical) -> float:
    terms = found if isinstance(found, Canonical) else found.canonical
    return tensor.relative_error(*terms.factors)


@pytest.mark.parametrize("rank", [4, 8, 16])
@pytest.mark.parametrize("kind", ["independent", "shared", "uneven", "ragged"])
def test_a_larger_family_started_from_the_smaller_one_is_never_worse(kind: str, rank: int) -> None:
    """CP <= water-filling."""
    tensor = drawn(kind, seed=rank)
    filled = initial_blocks(water_filled(tensor, rank))
    canonical = als(tensor, rank, start=filled.canonical, sweeps=20)
    larger, smaller = (error(tensor, found) for found in (canonical, filled))
    assert larger <= smaller + 1e-12
    if kind == "shared" and rank > 4:  # where slices share directions, the larger family pays
        assert larger < 0.96 * smaller


@pytest.mark.parametrize("kind", ["independent", "shared", "uneven", "ragged"])
def test_a_correction_keeps_the_error_of_its_start(kind: str) -> None:
    tensor = drawn(kind, seed=1)
    start = als(tensor, 8, start="random", sweeps=10)
    found = epc(tensor, start, sweeps=10)
    assert error(tensor, found) <= error(tensor, start) * (1 + 1e-9)
    assert term_sensitivity(found) < term_sensitivity(start.balanced())


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0]])
def test_slices_have_no_order(order: list[int]) -> None:
    tensor = drawn("uneven", seed=3)
    moved = FactoredTensor(tensor.left[order], tensor.right[order])
    before, after = (fusion_ranks(water_filled(which, 8)).ranks for which in (tensor, moved))
    assert after == tuple(before[i] for i in order)
    errors = [error(which, als(which, 8, sweeps=20, tolerance=0.0)) for which in (tensor, moved)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-8)
