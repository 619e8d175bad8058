"""Axis scales: from values to coordinates, and round tick values."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from attnrx.reports.numbers import NOTHING, Number, fixed, short


@dataclass(frozen=True)
class AxisScale:
    """Maps `low`..`high` to `start`..`stop`, linearly or logarithmically; `high` must exceed `low`."""

    low: Number
    high: Number
    start: Number
    stop: Number
    logarithmic: bool = False
    whole: bool = False  # integer ticks only, e.g. epochs

    def __call__(self, value: Number) -> Number:
        """Returns the coordinate of a value."""
        low, high, transformed = (self._transform(number) for number in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (transformed - low) / (high - low)

    def ticks(self, count: int = 4) -> list[Number]:
        """Returns about `count` round values within the range."""
        if not self.logarithmic:
            return _round_values(self.low, self.high, count, 1.0 if self.whole else 0.0)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        decades = last - first
        factors = (1,) if decades > 2 else (1, 2, 5)
        candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        inside = [value for value in candidates if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]
        return inside if len(inside) > 1 else [self.low, self.high]

    def labels(self, count: int = 4) -> list[tuple[Number, str]]:
        """Returns the ticks with their labels; on a linear axis all have the same decimals."""
        ticks = self.ticks(count)
        if self.logarithmic or len(ticks) < 2:
            return [(tick, short(tick)) for tick in ticks]
        step = ticks[1] - ticks[0]
        decimals = next((digits for digits in range(6) if abs(round(step, digits) - step) < step * 1e-6), 6)
        return [(tick, fixed(tick, decimals)) for tick in ticks]

    def _transform(self, value: Number) -> Number:
        return math.log10(max(value, self.low * 1e-6)) if self.logarithmic else value


def span(values: Iterable[Number], *, include: Iterable[Number] = (), room: Number = 0.06) -> tuple[Number, Number]:
    """Returns a range that contains all values with a margin of `room`; equal values get a range around them."""
    everything = [value for value in (*values, *include) if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(everything), max(everything)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):  # equal up to rounding
        margin = abs(low) * 0.1 if abs(low) > NOTHING else 1.0
        return low - margin, high + margin
    margin = (high - low) * room
    return low - margin, high + margin


def log_span(values: Iterable[Number]) -> tuple[Number, Number]:
    """Returns a range for positive values on a logarithmic axis."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [0.1, 1.0]
    return min(positive) / 1.3, max(positive) * 1.3


def _round_values(low: Number, high: Number, count: int, least: Number) -> list[Number]:
    rough = max((high - low) / max(count, 1), least)
    power = 10.0 ** math.floor(math.log10(rough))
    factors = (1, 2, 5, 10) if least else (1, 2, 2.5, 5, 10)  # a step of 2.5 is not an integer
    step = next(factor * power for factor in factors if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
