"""Monotone regression of measured times: no level of an axis is slower than a level that keeps more."""

from collections.abc import Collection

import numpy as np

from attnrx.optional import required_module
from attnrx.planning.space import Space


def never_slower(attention: np.ndarray, space: Space) -> np.ndarray:
    """Returns the least-squares fit of the times in which no lower level is slower.

    The savings of qk and vo are additive, with an interaction term for levels that both have reached, because a kernel
    may pad one to the other. Fitting few parameters to many times also reduces measurement noise.
    """
    qk, vo = space.available("qk"), space.available("vo")
    pairs = [(one, other) for one in (0, *qk) for other in (0, *vo)]
    steps = [
        [*_reached(one, qk), *_reached(other, vo), *_reached(min(one, other), set(qk) & set(vo))]
        for one, other in pairs
    ]
    found, at = attention.copy(), tuple(zip(*pairs, strict=True))
    found[at] = _falling(attention[at], np.array(steps))
    return found


def never_slower_mlp(mlp: np.ndarray, space: Space) -> np.ndarray:
    """Returns the least-squares fit of the savings in which no lower level saves less."""
    levels = (0, *space.available("mlp"))
    found = mlp.copy()
    found[levels, :] = _falling(
        mlp[levels, :], np.array([_reached(level, levels[1:]) for level in levels]), from_zero=True
    )
    return found


def _reached(level: int, levels: Collection[int]) -> list[float]:
    """Returns one indicator per level: 1 if `level` is at least as low, else 0."""
    return [float(level >= other) for other in sorted(levels)]


def _falling(times: np.ndarray, steps: np.ndarray, from_zero: bool = False) -> np.ndarray:
    """Fits times [rows, columns] by non-negative savings of the indicators `steps` [rows, steps], subtracted from a
    common intercept, or from zero."""
    if not steps.size:
        return times
    linear_model = required_module("sklearn.linear_model", "plan", "a cost model of measured latency")
    fitted = linear_model.LinearRegression(positive=True, fit_intercept=not from_zero).fit(steps, -times)
    return -fitted.predict(steps)
