"""The latency of a candidate relative to its reference, measured in one run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from attnrx.costs.conditions import Conditions
from attnrx.costs.profiling import profiled
from attnrx.costs.timing import Ratio, Timing, interleave
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class LatencyComparison:
    """Forward passes of two models on the same batch, and the conditions of their ratio (below 1: the candidate is
    faster).

    A kernel is named as by torch's profiler: "flash_attention_for_cpu", "math" (the slow path of the fused call); or it
    is
    "native" (the C++ kernel) or "unfused".
    """

    candidate: Timing
    reference: Timing
    ratio: Ratio
    candidate_kernel: str
    reference_kernel: str
    batch: int
    image_shape: tuple[int, ...]
    rounds: int
    clock: str
    conditions: Conditions
    threads: int
    hardware: str
    torch_version: str


@dataclass(frozen=True)
class LatencyProtocol:
    """How latency is measured: the models take turns for `rounds` rounds, after `warmup` rounds that do not count.

    `clock` is "wall", "cpu" (the CPU time of the process, for busy machines) or "cuda" (events of the stream); None
    means
    "cuda" on a CUDA device and "wall" elsewhere.
    """

    conditions: Conditions = field(default_factory=Conditions)
    rounds: int = 30
    warmup: int = 5
    clock: str | None = None
    seed: int = 0

    def __post_init__(self):
        if self.rounds < 2 or self.warmup < 1:
            raise InvalidInput(
                f"rounds={self.rounds}, warmup={self.warmup}: an interval needs at least two rounds, "
                "and the first pass is never typical, so warm up at least once."
            )


def compare_latency(
    candidate: nn.Module,
    reference: nn.Module,
    images: Float[Tensor, "batch channels height width"],
    protocol: LatencyProtocol | None = None,
) -> LatencyComparison:
    """Measures the forward pass of both models on the images; neither is changed."""
    return compare_latencies({"candidate": candidate}, reference, images, protocol)["candidate"]


def compare_latencies(
    candidates: Mapping[str, nn.Module],
    reference: nn.Module,
    images: Float[Tensor, "batch channels height width"],
    protocol: LatencyProtocol | None = None,
) -> dict[str, LatencyComparison]:
    """Measures the forward pass of several candidates and one reference in turns; none is changed."""
    if not candidates or "" in candidates:
        raise InvalidInput(f"candidates {list(candidates)}: give at least one to measure, and each a name.")
    if not len(images):
        raise InvalidInput("measuring latency needs at least one image; the batch is empty.")
    protocol = protocol or LatencyProtocol()
    conditions = protocol.conditions
    with conditions.held():
        batch = conditions.place_images(images)
        other: Callable[[], object] = partial(conditions.place(reference), batch)
        runs: dict[str, Callable[[], object]] = {
            name: partial(conditions.place(candidate), batch) for name, candidate in candidates.items()
        }
        clock = protocol.clock or ("cuda" if conditions.on_cuda else "wall")
        # The reference has the empty name, which no candidate has.
        seconds = interleave({**runs, "": other}, rounds=protocol.rounds, warmup=protocol.warmup, clock=clock)
        reference_kernel = profiled(other).attention_kernel
        return {
            name: LatencyComparison(
                candidate=Timing.of(seconds[name]),
                reference=Timing.of(seconds[""]),
                ratio=Ratio.of(seconds[name], seconds[""], protocol.seed),
                candidate_kernel=profiled(run).attention_kernel,
                reference_kernel=reference_kernel,
                batch=len(images),
                image_shape=tuple(images.shape[1:]),
                rounds=protocol.rounds,
                clock=clock,
                conditions=conditions,
                threads=torch.get_num_threads(),
                hardware=conditions.hardware,
                torch_version=torch.__version__,
            )
            for name, run in runs.items()
        }
