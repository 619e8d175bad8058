"""The largest share of a model that costs no more than a target, by bisection."""

from collections.abc import Callable

# Shares are multiples of 1 / GRID: finer than one direction of any layer, and exact in binary.
GRID = 4096


def largest_share(fits: Callable[[float], bool], least: float = 1 / GRID) -> float | None:
    """Returns the largest share in [`least`, 1] that fits, by bisection; None if `least` does not fit.

    `fits` must be monotone: true up to some share and false above it, because costs rise with the kept share.
    """
    # The invariant of the bisection is that `high` does not fit, so the full share is tested first. Integers, because
    # shares are multiples of 1 / GRID and `low` and `high` must meet exactly.
    if fits(1.0):
        return 1.0
    below = round(least * GRID) - 1  # counts as fitting until a share is found
    low, high = below, GRID
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / GRID) else (low, middle)
    return low / GRID if low > below else None
