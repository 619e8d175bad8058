"""Timing on machines that also do other work: interleaved runs, medians, intervals."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from attnrx.errors import InvalidInput, UnknownName
from attnrx.shapes import Float, Tensor

DRAWS = 2000


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: median, tenth and ninetieth percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Float[Tensor, "runs"]) -> "Timing":
        return cls(*torch.quantile(seconds, seconds.new_tensor([0.5, 0.1, 0.9])).tolist())


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of one time divided by the other of the same round, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Float[Tensor, "runs"], reference: Float[Tensor, "runs"], seed: int = 0) -> "Ratio":
        """Pairs the runs of each round: runs close in time share the load of other processes, which cancels in the
        ratio.
        """
        ratios = seconds / reference
        draws = torch.randint(len(ratios), (DRAWS, len(ratios)), generator=torch.Generator().manual_seed(seed))
        low, high = torch.quantile(_medians(ratios[draws]), ratios.new_tensor([0.025, 0.975])).tolist()
        return cls(float(_medians(ratios[None])), low, high)


def interleave(
    runs: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int, clock: str = "wall"
) -> dict[str, Float[Tensor, "runs"]]:
    """Times every run once per round and returns the seconds by name.

    `clock` is one of CLOCKS. Every second round runs in reverse order, so that no run always follows the same one.
    Garbage
    is collected before the rounds, not during them.
    """
    if rounds < 1 or warmup < 0 or not runs:
        raise InvalidInput(f"{rounds} rounds after {warmup} of {len(runs)} runs: give at least one round and one run.")
    if clock not in CLOCKS:
        raise UnknownName("clock", clock, CLOCKS)
    measure = CLOCKS[clock]
    for _ in range(warmup):
        for run in runs.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in order:
                seconds[name].append(measure(run))
            order.reverse()
    finally:
        if collecting:
            gc.enable()
    return {name: torch.tensor(times, dtype=torch.float64) for name, times in seconds.items()}


def _elapsed(now: Callable[[], float], run: Callable[[], object]) -> float:
    start = now()
    run()
    return now() - start


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _medians(rows: Float[Tensor, "draws runs"]) -> Float[Tensor, "draws"]:
    # Not torch.median, which takes the lower of the two middle values.
    return torch.quantile(rows, 0.5, dim=-1)


# "cpu" is the CPU time of the process on all its threads: on one thread it hardly depends on other load of the
# machine; on several it includes their waiting, so only "wall" is the latency that a user measures.
CLOCKS: dict[str, Callable[[Callable[[], object]], float]] = {
    "wall": partial(_elapsed, time.perf_counter),
    "cpu": partial(_elapsed, time.process_time),
    "cuda": _cuda_seconds,
}
