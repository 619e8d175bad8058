"""Rank allocation by measured losses: the exact optimum for losses of any shape."""

import numpy as np
import torch

from attnrx.decompositions.allocation import Ranks, require_multiple
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


def allocate_by_loss(loss: Float[Tensor, "units ranks"], total: int, *, multiple: int = 1, minimum: int = 0) -> Ranks:
    """Returns the ranks of all units that sum to `total` and minimize the sum of `loss[unit, rank]`.

    A multiple-choice knapsack, solved exactly by dynamic programming over the rank spent so far; the losses need not be
    monotone. `loss` has one column per rank, 0 to the number of directions. Of several optimal allocations, the one
    with larger ranks in the first units is returned.

    Args:
        loss: of each unit at each rank, in an additive unit such as nats of KL divergence.
        total: the sum of all ranks, exactly.
        multiple: every rank is a multiple of it; it must divide the number of directions.
        minimum: the smallest rank of a unit, rounded up to `multiple`.

    Raises:
        InvalidInput: The total is out of range, `multiple` does not divide, or losses are not finite.
    """
    units, most = loss.shape[0], loss.shape[1] - 1
    floor = -(-minimum // max(multiple, 1))
    _require_sensible(loss, total, multiple, minimum)
    if not units * floor * multiple <= total <= units * most:
        raise InvalidInput(
            f"a total rank of {total} is out of range: give between {units * floor * multiple} and {units * most}."
        )
    choices = loss.detach().cpu().double()[:, floor * multiple :: multiple]
    steps = _cheapest(choices.numpy(), total // multiple - units * floor)
    return tuple((step + floor) * multiple for step in steps)


def _cheapest(loss: np.ndarray, budget: int) -> list[int]:
    """Returns the steps of every unit, `budget` in total, that minimize the summed loss [units, steps + 1]."""
    widest = loss.shape[1] - 1
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    best_steps = []
    for own in loss:
        # Column t of row b is the best loss with b - t steps spent before this unit. numpy's argmin returns the
        # first of equal values, torch's may return any of them.
        padded = np.concatenate([np.full(widest, np.inf), best])
        sums = np.lib.stride_tricks.sliding_window_view(padded, widest + 1)[:, ::-1] + own
        best_steps.append(sums.argmin(1))
        best = sums.min(1)
    steps = []
    for unit_steps in reversed(best_steps):
        steps.append(int(unit_steps[budget]))
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
        raise InvalidInput(f"units have {most} directions, and a minimum rank of {minimum} was requested.")
