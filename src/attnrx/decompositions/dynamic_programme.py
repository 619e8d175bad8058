"""Sharing out a total rank by measured losses: the best of all allocations, whatever shape the losses have."""

import numpy as np
import torch

from attnrx.decompositions.allocation import Ranks, require_multiple
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


def allocate_by_loss(loss: Float[Tensor, "units ranks"], total: int, *, multiple: int = 1, minimum: int = 0) -> Ranks:
    """Returns every unit a rank so that the ranks sum to `total` and the sum of `loss[unit, rank]` is the least.

    A multiple-choice knapsack, solved exactly by dynamic programming over the rank spent so far: the losses may rise
    and fall as they were measured. `loss` has one column per rank, 0 to the number of directions. Among allocations of
    equal loss, the first units get the larger ranks.

    Args:
        loss: of each unit at each rank, in any unit that adds up, such as a KL divergence.
        total: the sum of all ranks, exactly.
        multiple: every rank is a multiple of it; it must divide the number of directions.
        minimum: the smallest rank of a unit, rounded up to `multiple`.

    Raises:
        InvalidInput: for a total that is out of reach, a multiple that divides nothing, losses that are not finite.
    """
    units, most = loss.shape[0], loss.shape[1] - 1
    floor = -(-minimum // max(multiple, 1))
    _require_sensible(loss, total, multiple, minimum)
    if not units * floor * multiple <= total <= units * most:
        raise InvalidInput(
            f"a total rank of {total} is out of reach: the units take between {units * floor * multiple} "
            f"and {units * most}."
        )
    choices = loss.detach().cpu().double()[:, floor * multiple :: multiple]
    steps = _cheapest(choices.numpy(), total // multiple - units * floor)
    return tuple((step + floor) * multiple for step in steps)


def _cheapest(loss: np.ndarray, budget: int) -> list[int]:
    """Spends exactly `budget` steps over the units of a loss [units, steps + 1] at the least sum."""
    widest = loss.shape[1] - 1
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    chosen = []
    for own in loss:
        # Column t of row b is the best loss with b - t steps spent before this unit. numpy's argmin takes the first of
        # equals, where torch's may take any.
        padded = np.concatenate([np.full(widest, np.inf), best])
        sums = np.lib.stride_tricks.sliding_window_view(padded, widest + 1)[:, ::-1] + own
        chosen.append(sums.argmin(1))
        best = sums.min(1)
    steps = []
    for taken in reversed(chosen):
        steps.append(int(taken[budget]))
        budget -= steps[-1]
    return steps[::-1]


def _require_sensible(loss: Tensor, total: int, multiple: int, minimum: int) -> None:
    most = loss.shape[1] - 1
    finite = torch.isfinite(loss).all(dim=1)
    if most < 0 or not bool(finite.all()):
        worst = int(finite.int().argmin()) if loss.numel() else 0
        raise InvalidInput(f"the losses need a finite number for every rank from 0 up; those of unit {worst} do not.")
    require_multiple(multiple, most, "the directions of a unit")
    require_multiple(multiple, total, "the total rank")
    if not 0 <= minimum <= most:
        raise InvalidInput(f"units have {most} directions, and a minimum rank of {minimum} was requested of them.")
