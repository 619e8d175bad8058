"""Times that are fitted together: no level of an axis is slower than those that keep more."""

from collections.abc import Collection

import numpy as np

from attnrx.optional import required_module
from attnrx.planning.space import Space


def never_slower(attention: np.ndarray, space: Space) -> np.ndarray:
    """Returns the nearest times at which no lower level is slower.

    What a level saves adds up over scores and values, but for what it only saves where both are as low: a kernel may
    pad the one to the other. Few steps through many times quiet the clock.
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
    """Returns the nearest savings at which no lower level saves less."""
    levels = (0, *space.available("mlp"))
    found = mlp.copy()
    found[levels, :] = _falling(
        mlp[levels, :], np.array([_reached(level, levels[1:]) for level in levels]), from_zero=True
    )
    return found


def _reached(level: int, levels: Collection[int]) -> list[float]:
    """For every level 1 where this one is as low, 0 elsewhere."""
    return [float(level >= other) for other in sorted(levels)]


def _falling(times: np.ndarray, steps: np.ndarray, from_zero: bool = False) -> np.ndarray:
    """Fits times [places, numbers] by what every step that a place has reached saves, off one whole or off zero."""
    if not steps.size:
        return times
    linear_model = required_module("sklearn.linear_model", "plan", "a cost model of measured latency")
    fitted = linear_model.LinearRegression(positive=True, fit_intercept=not from_zero).fit(steps, -times)
    return -fitted.predict(steps)
