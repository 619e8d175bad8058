"""The latency steps of the hardware: ranks and token counts that cost no more than smaller ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from attnrx.costs.latency import interleave
from attnrx.errors import InvalidInput
from attnrx.runtime.hardware import Measurements, may_measure

ROUNDS, WARMUP = 15, 3


@dataclass(frozen=True)
class Steps:
    """Ascending sizes with the seconds of each; an unmeasured size has the time of the next measured one.

    Times that differ by less than `noise`, a share, are treated as equal.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    noise: float = 0.03

    def __post_init__(self):
        rising = all(one < other for one, other in zip(self.sizes, self.sizes[1:], strict=False))
        if not self.sizes or not rising or len(self.sizes) != len(self.seconds) or min(self.seconds) <= 0:
            raise InvalidInput(
                f"{len(self.sizes)} sizes with {len(self.seconds)} times: give rising sizes, each a time above zero."
            )

    def cost(self, size: int) -> float:
        """Returns the seconds of a size: of the next measured one, or extrapolated in proportion from the largest."""
        for known_size, seconds in zip(self.sizes, self.seconds, strict=True):
            if known_size >= size:
                return seconds
        return self.seconds[-1] * size / self.sizes[-1]

    def rounded(self, size: int, most: int | None = None) -> int:
        """Returns the largest size, `most` at most, that is not slower than this one."""
        if size < 1 or (most is not None and most < size):
            raise InvalidInput(f"size {size} of at most {most}: give 1 or more, and no less for the most.")
        # A larger size within the noise is free, and keeps more of the model.
        limit = self.cost(size) * (1 + self.noise)
        candidates = [
            known_size
            for known_size, seconds in zip(self.sizes, self.seconds, strict=True)
            if known_size > size and seconds <= limit and (most is None or known_size <= most)
        ]
        return max(candidates, default=size)


def measured_steps(
    width: int,
    sizes: Sequence[int],
    *,
    tokens: int = 197,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    table: str | None = None,
) -> Steps:
    """Measures a map from `width` features to each size and back, on this many tokens; once per machine.

    Measurements are stored with those of `Autotuned` (ATTNRX_CACHE, or the file `table`). With the device, the
    precision and the threads of the later use, they show the ranks at which the latency of a factored map, or of a
    head, rises: prescribe `Steps.rounded(rank)`.

    Raises:
        InvalidInput: No sizes, or measuring is disabled (ATTNRX_MEASURE=0) and there is no record.
    """
    unique = tuple(sorted(set(sizes)))
    if not unique or unique[0] < 1 or width < 1 or tokens < 1:
        raise InvalidInput(f"width {width}, sizes {unique}, {tokens} tokens: give at least one of each, all positive.")
    measurements = Measurements(device, table)
    threads, precision = torch.get_num_threads(), str(dtype).removeprefix("torch.")
    key = f"steps | width={width} | {tokens} {device} {precision} | threads={threads}"
    # The record of a key grows: only sizes without a time are measured.
    times = {int(size): float(seconds) for size, seconds in (measurements.get(key, _are_seconds) or {}).items()}
    missing = [size for size in unique if size not in times]
    if missing:
        if not may_measure():
            raise InvalidInput(f"the sizes {missing} were never measured here, and ATTNRX_MEASURE=0 forbids it.")
        times |= _seconds(width, missing, tokens, device, dtype)
        measurements.put(key, {str(size): seconds for size, seconds in sorted(times.items())})
    return Steps(unique, tuple(times[size] for size in unique))


def _are_seconds(record: Mapping[str, object]) -> bool:
    return all(
        size.isascii() and size.isdigit() and isinstance(seconds, float) and 0 < seconds < math.inf
        for size, seconds in record.items()
    )


@torch.inference_mode()
def _seconds(width: int, sizes: Sequence[int], tokens: int, device: str, dtype: torch.dtype) -> Mapping[int, float]:
    features = torch.ones(tokens, width, device=device, dtype=dtype)
    # Small enough that the products of both maps stay in the range of float16.
    weights = {size: torch.full((size, width), 0.01, device=device, dtype=dtype) for size in sizes}
    runs = {str(size): partial(_there_and_back, features, weight) for size, weight in weights.items()}
    clock = "cuda" if torch.device(device).type == "cuda" else "wall"
    seconds = interleave(runs, rounds=ROUNDS, warmup=WARMUP, clock=clock)
    return {size: float(seconds[str(size)].median()) for size in sizes}


def _there_and_back(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # Times do not depend on the values of the weights, so one weight serves both maps.
    return F.linear(F.linear(features, weight), weight.t())
