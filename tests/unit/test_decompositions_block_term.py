"""Block terms: the ranks read off a fusion matrix, Algorithms 1 to 3, the joint form, constrained mixes."""

import pytest
import torch

from attnrx_lab.decompositions import (
    BlockTerms,
    Canonical,
    FactoredTensor,
    deflate,
    fusion_ranks,
    initial_blocks,
    nonnegative_units,
    ownership_penalty,
    water_filled,
)


def heads(slices: int = 4, inner: int = 6, width: int = 16, seed: int = 0, reach: float = 1.0) -> FactoredTensor:
    """Independent slices whose strengths run from 1 - reach / 2 to 1 + reach / 2."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(slices, inner, width, generator=generator) for _ in range(2))
    falling = torch.exp(-0.2 * torch.arange(inner))[:, None]
    return FactoredTensor(left * falling * torch.linspace(1 - reach / 2, 1 + reach / 2, slices)[:, None, None], right)


def formed(blocks: BlockTerms) -> torch.Tensor:
    """Eq. 6 written out."""
    total = torch.zeros(len(blocks.left), len(blocks.right), len(blocks.mix))
    for block, mix in enumerate(blocks.mix.T):
        mine = blocks.owner == block
        total += (blocks.left[:, mine] @ blocks.right[:, mine].T)[..., None] * mix
    return total


def test_blocks_are_a_canonical_decomposition_with_tied_mixes() -> None:
    blocks = BlockTerms(torch.randn(5, 4), torch.randn(6, 4), torch.randn(3, 3), torch.tensor([2, 0, 2, 0]))
    torch.testing.assert_close(blocks.canonical.dense(), formed(blocks))
    assert blocks.ranks == (2, 0, 2)


def test_owners_and_ranks_are_read_off_the_largest_values() -> None:
    mix = torch.tensor([[0.0, 4.0, 1.0, 0.0], [-2.0, 1.0, -1.0, 0.0], [1.0, 0.0, 0.5, 0.0]])
    fusion = fusion_ranks(Canonical(torch.ones(2, 4), torch.ones(2, 4), mix))
    assert fusion.owner.tolist() == [1, 0, 0, 0]
    assert fusion.ranks == (3, 1, 0)
    torch.testing.assert_close(fusion.off_block, torch.tensor([1 / 5, 1 / 17, 1.25 / 2.25, 0.0]))


def water_filled_blocks(tensor: FactoredTensor, rank: int) -> BlockTerms:
    """The best blocks with the identity as mix."""
    return initial_blocks(water_filled(tensor, rank))


def test_algorithms_2_and_3_are_those_of_the_formed_tensor() -> None:
    tensor, start = heads(), water_filled_blocks(heads(), 9)
    found, dense = deflate(tensor, start), tensor.dense()
    current = BlockTerms(start.left.clone(), start.right.clone(), start.mix.clone(), start.owner)
    for _ in range(5):
        for block in range(4):
            mine = current.owner == block
            if not bool(mine.any()):
                continue
            rest = dense - formed(current) + formed(only(current, block))
            left, right, mix = algorithm_2(rest, int(mine.sum()), 5)
            current.left[:, mine], current.right[:, mine], current.mix[:, block] = left, right, mix
    torch.testing.assert_close(formed(found), formed(current), rtol=1e-8, atol=1e-8)


def only(blocks: BlockTerms, block: int) -> BlockTerms:
    return BlockTerms(blocks.left * (blocks.owner == block), blocks.right, blocks.mix, blocks.owner)


def algorithm_2(rest: torch.Tensor, rank: int, sweeps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As printed, on the formed tensor."""
    unfolded = rest.flatten(0, 1).T
    mix = torch.linalg.eigh(unfolded @ unfolded.T).eigenvectors[:, -1]
    left = right = scale = torch.empty(0)
    for _ in range(sweeps):
        rows, _, columns = torch.linalg.svd(rest @ mix)
        left, right = rows[:, :rank], columns[:rank].T
        directions, strength, coefficients = torch.linalg.svd(
            torch.einsum("ijh,ir,jr->hr", rest, left, right), full_matrices=False
        )
        mix, scale = directions[:, 0], strength[0] * coefficients[0]
    return left * scale, right, mix


def test_the_nearest_mix_has_no_negative_value_and_unit_columns() -> None:
    mix = torch.tensor([[3.0, -1.0, 0.0, -3.0], [4.0, 2.0, 0.0, -1.0]])
    assert nonnegative_units(mix).tolist() == [[0.6, 0.0, 1.0, 0.0], [0.8, 1.0, 0.0, 1.0]]
    drawn = torch.randn(5, 40)
    nearest = nonnegative_units(drawn)
    assert bool((nearest >= 0).all())
    torch.testing.assert_close(nearest.norm(dim=0), torch.ones(40))
    others = torch.nn.functional.normalize(torch.randn(200, 5, 40).abs(), dim=1)
    assert bool(((drawn - nearest).norm(dim=0) <= (drawn - others).norm(dim=1) + 1e-12).all())


def test_the_penalty_is_zero_exactly_with_one_owner_a_column() -> None:
    owned = torch.tensor([[2.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
    assert float(ownership_penalty(owned)) == 0
    shared = owned + torch.tensor([[0.0, 1e-3, 0.0], [0.0, 0.0, 0.0]])
    assert float(ownership_penalty(shared)) == pytest.approx(2e-3, rel=1e-2)
    assert float(ownership_penalty(torch.ones(4, 3))) == pytest.approx(3 * 3)
    mix = torch.rand(4, 3, requires_grad=True)
    assert torch.autograd.gradcheck(ownership_penalty, (mix,))
    empty = torch.zeros(2, 3, requires_grad=True)
    ownership_penalty(empty).backward()
    assert empty.grad is not None and not empty.grad.any()
