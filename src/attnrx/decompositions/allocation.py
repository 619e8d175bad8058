"""Sharing out a total rank: which of all directions of many heads and layers stay."""

from collections.abc import Sequence
from math import inf

import torch

from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor

Ranks = tuple[int, ...]


def water_fill(
    strengths: Sequence[Float[Tensor, "_ _"]],
    total: int,
    *,
    multiple: int = 1,
    minimum: int = 0,
    cost: Sequence[int | float] | None = None,
) -> tuple[Ranks, ...]:
    """Returns every unit of every layer a rank so that the squared strengths left out are as few as possible.

    `strengths` holds one tensor [units, directions] per layer (units are heads; widths may differ between layers); a
    rank of r stands for the r strongest directions of a unit. One layer makes the scope a layer, all of them the model.

    Without `cost` the ranks sum to `total`, and the result is the optimum: gains fall along a unit, also in steps of
    `multiple` and beyond `minimum`, so taking the largest gains is exact (an exchange argument). With `cost`, one
    number per layer for a direction of it, `total` is the budget for the sum of cost * rank. Gains per cost are taken
    until nothing fits: exact where all costs are equal, and otherwise less than one step away from the optimum, the
    first one that did not fit. Ties go by layer, unit and index.

    Args:
        strengths: per layer, of any sign and order.
        total: the sum of all ranks, or the budget.
        multiple: every rank is a multiple of it; it must divide every layer's directions.
        minimum: the smallest rank of a unit, rounded up to `multiple`.
        cost: per layer, positive.

    Raises:
        InvalidInput: for a total that is out of reach, a multiple that divides nothing, strengths that are not finite.
    """
    require_multiple(multiple, 0, "nothing")
    layers = [_steps(layer, strengths[layer], multiple, minimum) for layer in range(len(strengths))]
    prices = [float(price) for price in ([1] * len(layers) if cost is None else cost)]
    if len(prices) != len(layers) or not all(0 < price < inf for price in prices):
        raise InvalidInput(f"cost needs one positive number for each of {len(layers)} layers, found {prices}.")
    floor = -(-minimum // multiple)
    budget = total / multiple - sum(price * layer.shape[0] * floor for price, layer in zip(prices, layers, strict=True))
    if cost is None:
        _require_reachable(total, multiple, floor, layers)
    elif budget < 0:
        raise InvalidInput(f"a budget of {total} is less than the minimum rank of {minimum} per unit costs.")
    return _take_largest([layer[:, floor:] for layer in layers], prices, budget, (floor, multiple))


def uniform_ranks(total: int, units: int, most: int, *, multiple: int = 1) -> Ranks:
    """Returns `units` units ranks that sum to `total` and differ by one step at most, the larger ones first.

    Raises:
        InvalidInput: for a total above units * most, negative, or not a multiple of `multiple`.
    """
    require_multiple(multiple, most, "the directions of a unit")
    require_multiple(multiple, total, "the total rank")
    if not 0 <= total <= units * most:
        raise InvalidInput(f"a total rank of {total} was requested of {units} units of {most} directions each.")
    steps, extra = divmod(total // multiple, units) if units else (0, 0)
    return tuple((steps + (unit < extra)) * multiple for unit in range(units))


def require_multiple(multiple: int, count: int, what: str) -> None:
    """Raises InvalidInput unless `multiple` is positive and divides the count."""
    if multiple < 1:
        raise InvalidInput(f"ranks are multiples of a positive number, found {multiple}.")
    if count % multiple:
        below = count - count % multiple
        raise InvalidInput(
            f"ranks are to be multiples of {multiple}, which does not divide {what}, {count}: "
            f"take {below} or {below + multiple}, or another multiple."
        )


def _steps(layer: int, strength: Tensor, multiple: int, minimum: int) -> Float[Tensor, "units steps"]:
    """Returns the energy that each step of `multiple` directions adds, descending along a unit."""
    if strength.ndim != 2 or not bool(torch.isfinite(strength).all()):
        raise InvalidInput(f"the strengths of layer {layer} must be finite, [units, directions].")
    directions = strength.shape[1]
    require_multiple(multiple, directions, f"the directions of layer {layer}")
    if not 0 <= minimum <= directions:
        raise InvalidInput(
            f"a minimum rank of {minimum} was requested of layer {layer}, which has {directions} directions."
        )
    energy = strength.detach().cpu().double().square().sort(dim=1, descending=True).values
    return energy.unflatten(1, (-1, multiple)).sum(-1) if directions else energy


def _require_reachable(total: int, multiple: int, floor: int, layers: list[Tensor]) -> None:
    require_multiple(multiple, total, "the total rank")
    least = sum(layer.shape[0] for layer in layers) * floor * multiple
    most = sum(layer.numel() for layer in layers) * multiple
    if not least <= total <= most:
        raise InvalidInput(f"a total rank of {total} is out of reach: the units take between {least} and {most}.")


def _take_largest(layers: list[Tensor], prices: list[float], budget: float, rank: tuple[int, int]) -> tuple[Ranks, ...]:
    floor, multiple = rank
    taken = [[floor] * layer.shape[0] for layer in layers]
    owners = [
        (number, unit)
        for number, layer in enumerate(layers)
        for unit in range(layer.shape[0])
        for _ in range(layer.shape[1])
    ]
    worth = [(layer / price).flatten() for layer, price in zip(layers, prices, strict=True)]
    left, slack = budget, 1e-12 * budget  # of prices that are not whole numbers
    for step in torch.cat(worth).argsort(descending=True, stable=True).tolist() if worth else []:
        number, unit = owners[step]
        if prices[number] <= left + slack:
            left -= prices[number]
            taken[number][unit] += 1
    return tuple(tuple(steps * multiple for steps in layer) for layer in taken)
