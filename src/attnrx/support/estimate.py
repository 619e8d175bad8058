"""A measured number with its interval: an accuracy, a divergence, a speed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A measured number with its 95 % interval, extended to contain it: percentiles of few resamples may not."""

    value: float
    low: float
    high: float

    def __post_init__(self):
        object.__setattr__(self, "low", min(self.low, self.value))
        object.__setattr__(self, "high", max(self.high, self.value))

    def scaled(self, factor: float) -> "Estimate":
        """Returns the estimate in another unit; a negative factor swaps the ends."""
        ends = sorted((self.low * factor, self.high * factor))
        return Estimate(self.value * factor, *ends)

    def text(self, digits: int) -> str:
        """Returns the value and its interval with this many decimals."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"
