"""A measured number with its interval, e.g. an accuracy, a divergence or a speed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A measured number with its 95 % interval. The interval is extended if it does not contain the number."""

    value: float
    low: float
    high: float

    def __post_init__(self):
        object.__setattr__(self, "low", min(self.low, self.value))
        object.__setattr__(self, "high", max(self.high, self.value))

    def scaled(self, factor: float) -> "Estimate":
        """Returns the estimate in another unit. A negative factor swaps the ends of the interval."""
        ends = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, *ends)

    def text(self, digits: int) -> str:
        """Returns the value and its interval with `digits` decimals."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"
