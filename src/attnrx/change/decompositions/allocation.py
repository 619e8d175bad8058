"""Rank allocation: the distribution of a total rank over heads and layers, by strength or by measured losses."""

from collections.abc import Sequence

import numpy as np
import torch

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor

Ranks = tuple[int, ...]


def water_fill(
    strengths: Sequence[Float[Tensor, "_ _"]], total: int, *, multiple: int = 1, minimum: int = 0
) -> tuple[Ranks, ...]:
    """Returns the rank of every unit of every layer that minimizes the sum of the discarded squared strengths.

    `strengths` has one tensor [units, directions] per layer (units are heads; the number of directions may differ
    between layers), of any sign and in any order; rank r keeps the r strongest directions of a unit. Pass one layer to
    allocate within a layer, all layers to allocate over the model.

    The ranks sum to `total`, and the result is optimal: gains decrease along a unit, also in steps of `multiple` and
    above `minimum`, so taking the largest gains is exact (an exchange argument). Ties are broken by layer, unit and
    index. Every rank is a multiple of `multiple`, which must divide every layer's directions, and at least `minimum`,
    rounded up to it. Raises InvalidInput for a total out of range or another multiple.
    """
    for strength in strengths:
        _require_directions(strength.shape[1], multiple, minimum)
    # The energy that each step of `multiple` directions adds, [units, steps], descending along a unit.
    energies = [each.detach().cpu().double().square().sort(dim=1, descending=True).values for each in strengths]
    layers = [each.unflatten(1, (-1, multiple)).sum(-1) if each.shape[1] else each for each in energies]
    # In steps of `multiple` from here on; every unit has `floor` steps before any gains are compared.
    floor, units = -(-minimum // multiple), sum(len(layer) for layer in layers)
    _require_total(total, multiple, units * floor * multiple, sum(layer.numel() for layer in layers) * multiple)
    gains = [layer[:, floor:] for layer in layers]
    # An empty tensor first, because `cat` needs one.
    order = torch.cat([torch.empty(0), *(layer.flatten() for layer in gains)]).argsort(descending=True, stable=True)
    # Gains decrease along a unit, so the selected steps of a unit are its first ones: their number is its rank.
    selection = torch.zeros_like(order).index_fill(0, order[: total // multiple - units * floor], 1)
    parts = selection.split([layer.numel() for layer in gains])
    counts = [floor + part.view(layer.shape).sum(1) for part, layer in zip(parts, gains, strict=True)]
    return tuple(tuple((count * multiple).tolist()) for count in counts)


def _require_total(total: int, multiple: int, least: int, largest: int) -> None:
    if multiple < 1 or total % multiple or not least <= total <= largest:
        raise InvalidInput(
            f"a total rank of {total} in multiples of {multiple} is not possible: give a multiple between {least} and "
            f"{largest}."
        )


def _require_directions(directions: int, multiple: int, minimum: int) -> None:
    if multiple < 1 or directions % multiple or not 0 <= minimum <= directions:
        raise InvalidInput(
            f"ranks in multiples of {multiple} and at least {minimum} are not possible with {directions} directions: "
            f"the multiple must divide them, and the minimum must be in 0 to {directions}."
        )


def allocate_by_loss(loss: Float[Tensor, "units ranks"], total: int, *, multiple: int = 1, minimum: int = 0) -> Ranks:
    """Returns the ranks of all units that sum to `total` and minimize the sum of `loss[unit, rank]`.

    A multiple-choice knapsack, solved exactly by dynamic programming over the rank spent so far; the losses need not be
    monotone. `loss` has one column per rank, 0 to the number of directions. Of several optimal allocations, the one
    with larger ranks in the first units is returned. The unit of the losses is additive, such as nats of KL divergence.

    `multiple` and `minimum` are those of `water_fill`, and so are the errors.

    Raises:
        InvalidInput: The multiple, the minimum or the total is not possible with these directions.
    """
    units, largest = loss.shape[0], loss.shape[1] - 1
    _require_directions(largest, multiple, minimum)
    floor = -(-minimum // multiple)
    _require_total(total, multiple, units * floor * multiple, units * largest)
    choices = loss.detach().cpu().double()[:, floor * multiple :: multiple]
    steps = _cheapest(choices.numpy(), total // multiple - units * floor)
    return tuple((step + floor) * multiple for step in steps)


def _cheapest(loss: np.ndarray, budget: int) -> list[int]:
    """Returns the steps of every unit, `budget` in total, that minimize the summed loss [units, steps + 1]."""
    # best[b] is the smallest loss of the units so far with b steps in total; every unit replaces it by the minimum over
    # its steps t of best[b - t] + loss[t]. The choices of the units are stored, and read backwards from best[budget].
    widest = loss.shape[1] - 1
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    best_steps = []
    for unit_loss in loss:
        # Column t of row b is the best loss with b - t steps spent before this unit. numpy's argmin returns the
        # first of equal values, torch's may return any of them.
        padded = np.concatenate([np.full(widest, np.inf), best])
        sums = np.lib.stride_tricks.sliding_window_view(padded, widest + 1)[:, ::-1] + unit_loss
        best_steps.append(sums.argmin(1))
        best = sums.min(1)
    steps = []
    for unit_steps in reversed(best_steps):
        steps.append(int(unit_steps[budget]))
        budget -= steps[-1]
    return steps[::-1]
