"""Sharing out a total rank: against brute force over every allocation, and by measured losses."""

import itertools

import pytest
import torch

from attnrx.change.decompositions import balance, water_fill
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx_lab.rules.divergence import allocate_by_loss


def allowed(directions: int, multiple: int, minimum: int) -> list[int]:
    return [rank for rank in range(0, directions + 1, multiple) if rank >= minimum]


def left_out(strengths: list[Tensor], ranks) -> float:
    """The energy that an allocation leaves out, directions counted from the strongest."""
    units = [unit.abs().sort(descending=True).values for layer in strengths for unit in layer]
    flat = list(itertools.chain.from_iterable(ranks))
    return sum(float(unit[rank:].square().sum()) for unit, rank in zip(units, flat, strict=True))


def least(strengths: list[Tensor], total: int, multiple: int = 1, minimum: int = 0) -> float:
    """The least energy left out by any allocation of the total, by trying all of them."""
    choices = [allowed(layer.shape[1], multiple, minimum) for layer in strengths for _ in layer]
    shapes = [layer.shape[0] for layer in strengths]
    best = float("inf")
    for flat in itertools.product(*choices):
        chosen = iter(flat)
        ranks = [[next(chosen) for _ in range(units)] for units in shapes]
        if sum(flat) == total:
            best = min(best, left_out(strengths, ranks))
    return best


@pytest.mark.parametrize("total", [0, 5, 12])
def test_water_filling_is_the_best_of_all_allocations(total: int):
    strengths = [torch.rand(3, 4)]
    ranks = water_fill(strengths, total)
    assert sum(ranks[0]) == total
    best = least(strengths, total)
    assert left_out(strengths, ranks) == pytest.approx(best, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("multiple", "minimum"), [(1, 1), (2, 0), (2, 1), (1, 3)])
def test_water_filling_is_the_best_in_multiples_and_above_a_minimum(seed: int, multiple: int, minimum: int):
    strengths = [torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)), torch.randn(1, 8) ** 3]
    total = 12
    ranks = water_fill(strengths, total, multiple=multiple, minimum=minimum)
    assert sum(map(sum, ranks)) == total
    assert all(rank % multiple == 0 and rank >= minimum for layer in ranks for rank in layer)
    best = least(strengths, total, multiple, minimum)
    assert left_out(strengths, ranks) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("metric", ["random", "deficient"])
def test_water_filling_minimises_the_error_of_balanced_heads(metric: str):
    """Claim (d): for forms rewritten in any metric, the strengths left out are the whole error."""
    samples = torch.randn(2, 3, 3 if metric == "deficient" else 9, 4)
    left, right = samples.mT @ samples
    balanced = balance(left, right)
    ((*ranks,),) = water_fill([balanced.strength], 6)

    def error(ranks) -> float:
        kept = (torch.arange(4) < torch.tensor(ranks)[:, None]) * balanced.strength
        form = torch.eye(4) - (balanced.left * kept[..., None]).mT @ balanced.right
        return float(torch.einsum("hij,hik,hkl,hjl->", form, left, form, right))

    best = min(error(other) for other in itertools.product(range(5), repeat=3) if sum(other) == 6)
    assert error(ranks) == pytest.approx(best, rel=1e-9)


def test_a_layer_alone_and_all_layers_together_are_two_scopes():
    weak, strong = torch.full((2, 4), 0.1), torch.full((2, 4), 10.0)
    assert water_fill([weak, strong], 8) == ((0, 0), (4, 4))
    assert [water_fill([layer], 4)[0] for layer in (weak, strong)] == [(4, 0), (4, 0)]


def test_ties_go_by_layer_unit_and_index():
    assert water_fill([torch.ones(2, 3), torch.ones(2, 3)], 7) == ((3, 3), (1, 0))


def test_a_minimum_is_rounded_up_to_the_multiple():
    assert water_fill([torch.tensor([[9.0, 9.0, 9.0, 9.0], [0.1, 0.1, 0.1, 0.1]])], 4, multiple=2, minimum=1) == (
        (2, 2),
    )
    assert allocate_by_loss(torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 4, multiple=2, minimum=1) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total": 13}, "between 0 and 12"),
        ({"total": 2, "minimum": 1}, "between 3 and 12"),
        ({"total": 5, "multiple": 2}, "a total rank of 5"),
        ({"total": 6, "multiple": 3}, "must divide"),
        ({"total": 6, "minimum": 5}, "at least 5 are not possible with 4 .*minimum must be in 0 to 4"),
    ],
)
def test_what_cannot_be_allocated_is_refused_with_what_can(arguments: dict, message: str):
    with pytest.raises(InvalidInput, match=message):
        water_fill([torch.ones(3, 4)], **arguments)


def by_trying(loss: Tensor, total: int, multiple: int, minimum: int) -> float:
    choices = [allowed(loss.shape[1] - 1, multiple, minimum)] * loss.shape[0]
    return min(
        sum(float(unit[rank]) for unit, rank in zip(loss, ranks, strict=True))
        for ranks in itertools.product(*choices)
        if sum(ranks) == total
    )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("multiple", "minimum"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("total", [12, 18])
def test_allocation_by_loss_is_the_best_of_all_allocations(seed: int, multiple: int, minimum: int, total: int):
    # No order is imposed: a measured loss need not fall, nor be convex.
    loss = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    ranks = allocate_by_loss(loss, total, multiple=multiple, minimum=minimum)
    assert sum(ranks) == total and all(rank % multiple == 0 and rank >= minimum for rank in ranks)
    assert float(loss[range(4), ranks].sum()) == pytest.approx(by_trying(loss, total, multiple, minimum), rel=1e-12)


def test_allocation_by_loss_gives_the_first_units_the_larger_ranks_among_equals():
    assert allocate_by_loss(torch.zeros(3, 5), 6) == (4, 2, 0)
    assert allocate_by_loss(torch.zeros(0, 5), 0) == ()
