"""Tucker and block terms against their definitions, on formed tensors in float64."""

import pytest
import torch

from attnrx.support.errors import InvalidInput
from attnrx_lab.decompositions import FactoredTensor, Tucker, hosvd, tucker_terms


def tensor(slices: int = 3, inner: int = 4, rows: int = 9, columns: int = 7) -> FactoredTensor:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(slices, inner, rows, generator=generator, dtype=torch.float64)
    right = torch.randn(slices, inner, columns, generator=generator, dtype=torch.float64)
    return FactoredTensor(left * torch.linspace(1, 0.2, inner)[:, None], right)


def unfolded(dense: torch.Tensor, mode: int) -> torch.Tensor:
    return dense.movedim(mode, 0).flatten(1)


def written_out(dense: torch.Tensor, ranks: tuple[int, int, int]) -> torch.Tensor:
    """The truncated HOSVD by its definition: projections on leading left singular vectors of every unfolding."""
    for mode, rank in enumerate(ranks):
        vectors = torch.linalg.svd(unfolded(SOURCE.dense(), mode), full_matrices=False).U[:, :rank]
        dense = (dense.movedim(mode, -1) @ (vectors @ vectors.T)).movedim(-1, mode)
    return dense


SOURCE = tensor()


@pytest.mark.parametrize("ranks", [(4, 3, 2), (1, 1, 1), (6, 5, 3), (9, 7, 3)])
def test_hosvd_is_the_definition(ranks: tuple[int, int, int]) -> None:
    found = hosvd(SOURCE, ranks)
    dense = SOURCE.dense()
    torch.testing.assert_close(found.dense(), written_out(dense, ranks), rtol=1e-11, atol=1e-11)
    for factor, rank in zip((found.left, found.right, found.mix), ranks, strict=True):
        torch.testing.assert_close(factor.T @ factor, torch.eye(rank, dtype=torch.float64), rtol=1e-11, atol=1e-11)
    lost = sum(
        float(torch.linalg.svdvals(unfolded(dense, mode))[rank:].square().sum()) for mode, rank in enumerate(ranks)
    )
    assert float((found.dense() - dense).square().sum()) <= lost + 1e-18


def test_the_core_is_orthogonal_and_ordered() -> None:
    """What distinguishes the HOSVD among the Tucker decompositions, at full ranks."""
    found = hosvd(SOURCE, (9, 7, 3))
    torch.testing.assert_close(found.dense(), SOURCE.dense(), rtol=1e-11, atol=1e-11)
    for mode in range(3):
        rows = unfolded(found.core, mode)
        gram = rows @ rows.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-10 * float(gram.max()))
        norms = gram.diagonal()
        assert bool((norms[:-1] >= norms[1:] - 1e-10).all())


def test_terms_are_found_where_the_tensor_is_their_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64)).Q for n in (9, 7))
    cores = (
        torch.randn(2, 3, 2, 2, generator=generator, dtype=torch.float64)
        * torch.tensor([4.0, 1.0])[:, None, None, None]
    )
    # Two blocks in orthogonal subspaces: the left factors of the slices, then their right ones.
    inner_left = torch.cat([left[:, :2], left[:, 2:]], 1).T.expand(3, -1, -1)
    inner_right = torch.cat([cores[0] @ right[:, :2].T, cores[1] @ right[:, 2:].T], 1)
    summed = FactoredTensor(inner_left, inner_right)
    terms = tucker_terms(summed, 2, (2, 2, 3), sweeps=30)
    assert len(terms) == 2
    torch.testing.assert_close(sum_of(terms), summed.dense(), rtol=1e-6, atol=1e-6)
    # One term of these ranks cannot: its columns are too few.
    assert float((hosvd(summed, (2, 2, 3)).dense() - summed.dense()).norm()) > 0.1 * summed.norm


def sum_of(terms: tuple[Tucker, ...]) -> torch.Tensor:
    return torch.stack([term.dense() for term in terms]).sum(0)


def test_more_terms_have_less_error_and_one_is_the_hosvd() -> None:
    errors = [float((sum_of(tucker_terms(SOURCE, count, (2, 2, 3))) - SOURCE.dense()).norm()) for count in (1, 2, 3)]
    assert errors[0] > errors[1] > errors[2]
    torch.testing.assert_close(sum_of(tucker_terms(SOURCE, 1, (2, 2, 3))), hosvd(SOURCE, (2, 2, 3)).dense())


@pytest.mark.parametrize("ranks", [(0, 1, 1), (10, 1, 1), (1, 8, 1), (1, 1, 4)])
def test_ranks_beyond_a_mode_are_refused(ranks: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="1 to the size of every mode"):
        hosvd(SOURCE, ranks)


def test_no_term_is_refused() -> None:
    with pytest.raises(InvalidInput, match="one or more"):
        tucker_terms(SOURCE, 0, (1, 1, 1))
