"""Rank allocation: the distribution of a total rank over heads and layers by strength."""

from collections.abc import Sequence

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
        require_directions(strength.shape[1], multiple, minimum)
    # The energy that each step of `multiple` directions adds, [units, steps], descending along a unit.
    energies = [each.detach().cpu().double().square().sort(dim=1, descending=True).values for each in strengths]
    layers = [each.unflatten(1, (-1, multiple)).sum(-1) if each.shape[1] else each for each in energies]
    # In steps of `multiple` from here on; every unit has `floor` steps before any gains are compared.
    floor, units = -(-minimum // multiple), sum(len(layer) for layer in layers)
    require_total(total, multiple, units * floor * multiple, sum(layer.numel() for layer in layers) * multiple)
    gains = [layer[:, floor:] for layer in layers]
    # An empty tensor first, because `cat` needs one.
    order = torch.cat([torch.empty(0), *(layer.flatten() for layer in gains)]).argsort(descending=True, stable=True)
    # Gains decrease along a unit, so the selected steps of a unit are its first ones: their number is its rank.
    selection = torch.zeros_like(order).index_fill(0, order[: total // multiple - units * floor], 1)
    parts = selection.split([layer.numel() for layer in gains])
    counts = [floor + part.view(layer.shape).sum(1) for part, layer in zip(parts, gains, strict=True)]
    return tuple(tuple((count * multiple).tolist()) for count in counts)


def require_total(total: int, multiple: int, least: int, largest: int) -> None:
    """Raises InvalidInput for a total rank that is out of range, or no multiple."""
    if multiple < 1 or total % multiple or not least <= total <= largest:
        raise InvalidInput(
            f"a total rank of {total} in multiples of {multiple} is not possible: give a multiple between {least} and "
            f"{largest}."
        )


def require_directions(directions: int, multiple: int, minimum: int) -> None:
    """Raises InvalidInput for a multiple or a minimum that so many directions do not have."""
    if multiple < 1 or directions % multiple or not 0 <= minimum <= directions:
        raise InvalidInput(
            f"ranks in multiples of {multiple} and at least {minimum} are not possible with {directions} directions: "
            f"the multiple must divide them, and the minimum must be in 0 to {directions}."
        )
