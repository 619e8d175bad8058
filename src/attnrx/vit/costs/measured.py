"""Compares models under stated conditions: their latency, measured in turns, and their memory."""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from attnrx.support.arguments import COUNT, checked, number, one_of, optional, require_fields, whole
from attnrx.support.errors import InvalidInput, NotSupported, UnknownName
from attnrx.support.estimate import Estimate
from attnrx.support.hardware import Load, device_name
from attnrx.support.modules import copy_module
from attnrx.support.progress import track
from attnrx.support.shapes import Float, ImageBatch, Tensor
from attnrx.support.subprocess_runner import shared_subprocess

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# PyTorch needs passes before a recording, because kernel libraries allocate their memory in the first ones.
PASSES_BEFORE = 3
# The 97.5 % quantiles of Student's t, by the number of medians, and the number of parts into which a run is divided.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
PARTS = 4
# If a protocol ends once the speeds are precise, it checks them every LOOK_EVERY rounds, from round FIRST_LOOK on, but
# not before an eighth of all rounds.
LOOK_EVERY, FIRST_LOOK = 4, 12
# The number of processes for measurements that are evidence. Different processes differ by more than the rounds of one
# process, and these rounds depend on each other. With four processes, the intervals of 32 rounds are 1.3 to 1.7 times
# as wide (benchmarks/coverage.py).
PROCESSES = 8
# REPEATED: if a call takes at most this many seconds, its latency depends on the contents of the caches when it starts.
# So other calls of the same model run before it. They take about WARM seconds, and there are at most MOST_WARM.
REPEATED, WARM, MOST_WARM = 0.1, 0.06, 6
# If other processes use more processors than this during a measurement, on average, the machine counts as busy.
BUSY = 0.2
# The roles beside the candidates in one run. They are blank, because a candidate's name cannot be blank.
REFERENCE, UNCHANGED = "", " "


class RecordedCalls:
    """Calls of a model on a CUDA device, for inference, that replay its kernels as one CUDA graph.

    For few images or small layers, launching the kernels one by one takes longer than running them. The first call with
    inputs of a new shape and type records a graph. Later calls copy their inputs to the memory of the recorded inputs,
    and overwrite the outputs of the earlier call. Weights may change in place. If you replace a weight by another
    tensor, the recorded graph still uses the old one.
    """

    def __init__(self, model: Callable[[Tensor], Any]):
        self.model = model
        self._recorded: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}

    @torch.inference_mode()
    def __call__(self, images: Float[Tensor, "batch *sizes"]) -> Any:
        """Returns the outputs of the model.

        Raises:
            NotSupported: The model does something that cannot be recorded, e.g. it waits for the device.
        """
        key = images.shape, images.dtype, images.device
        if key not in self._recorded:
            self._recorded[key] = self._record(images.clone())
        graph, inputs, outputs = self._recorded[key]
        inputs.copy_(images)
        graph.replay()
        return outputs

    def _record(self, inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        # On another stream, as PyTorch requires for the passes before a CUDA graph is recorded.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(PASSES_BEFORE):
                self.model(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = self.model(inputs)
        except RuntimeError as error:
            raise NotSupported(
                f"this model cannot be recorded as a CUDA graph ({str(error).strip().splitlines()[0]}): run it without "
                "one (graphs=False)."
            ) from error
        return graph, inputs, outputs


@dataclass(frozen=True)
class Conditions:
    """The device, precision, threads and compilation of both models.

    Weights and images are cast to `precision`. `threads` is the number of CPU threads, or None to keep the current
    number. `compiled` runs both models through torch.compile. It first clears torch.compile's caches, so earlier models
    do not count towards the recompilation limit. `graphs` replays the kernels as one CUDA graph (`RecordedCalls`). With
    `plain`, models are timed in the code of their library, and never in attnrx's kernels.
    """

    device: str = "cpu"
    precision: str = "float32"
    threads: int | None = None
    compiled: bool = False
    graphs: bool = False
    plain: bool = False

    def __post_init__(self):
        require_fields(self, precision=one_of(*PRECISIONS))
        if self.graphs and not self.on_cuda:
            raise InvalidInput(f"graphs=True on device={self.device!r}: CUDA graphs need device='cuda'.")

    def prepare(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """Returns a copy of the model under these conditions, in evaluation mode. The model itself is unchanged.

        With `graphs`, the calls are recorded (`RecordedCalls`).
        """
        # A copy made in inference mode has inference tensors, and values derived from these cannot be cached.
        with torch.inference_mode(mode=False):
            clone = copy_module(model).eval().to(self.device, PRECISIONS[self.precision])
        # fullgraph: if a part fell back to eager, the call must fail here. Otherwise it would be timed as compiled.
        # dynamic=False: one input shape is measured, so the kernels are specialized to it.
        ready = torch.compile(clone, fullgraph=True, dynamic=False) if self.compiled else clone
        return RecordedCalls(ready) if self.graphs else ready

    def prepare_images(self, images: ImageBatch) -> ImageBatch:
        return images.to(self.device, PRECISIONS[self.precision])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sets the number of threads and disables gradients inside the context."""
        num_threads = torch.get_num_threads()
        if self.compiled:
            torch.compiler.reset()
        try:
            torch.set_num_threads(self.threads or num_threads)
            with torch.inference_mode():
                yield
        finally:
            torch.set_num_threads(num_threads)

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def in_kernels(self) -> bool:
        """Whether models are timed in attnrx's kernels (`attnrx.accelerate`). Only eager PyTorch on a CPU uses them."""
        return not (self.on_cuda or self.compiled or self.plain)

    @property
    def hardware(self) -> str:
        return device_name(self.device)


@dataclass(frozen=True)
class Timing:
    """The seconds of one run: median, tenth and ninetieth percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Float[Tensor, "runs"]) -> "Timing":
        return cls(*torch.quantile(seconds, seconds.new_tensor([0.5, 0.1, 0.9])).tolist())


def ratio_of(seconds: Float[Tensor, "*processes runs"], reference: Float[Tensor, "*processes runs"]) -> Estimate:
    """Returns the median over rounds of `seconds / reference`, with its 95 % interval.

    The two times of a round are paired, because other processes slow down both alike, which cancels in the ratio. The
    interval is a t interval on a logarithmic scale. With several processes, it is computed from their medians and
    includes differences between processes. With one process, it is computed from the medians of four consecutive parts
    of the run (batch means). A repetition in another process can then differ by more than the interval.

    Raises:
        InvalidInput: There are fewer than two rounds.
    """
    ratios = (seconds / reference).double().reshape(-1, seconds.shape[-1])
    processes, rounds = ratios.shape
    if rounds < 2:
        raise InvalidInput(f"{rounds} round: an interval needs at least two.")
    # The remaining load lasts for many rounds. A bootstrap of single rounds would treat them as independent, and its
    # 95 % interval would cover the ratio in only 60 % of the runs. Quarters of the run are nearly independent, and
    # fewer parts would have much wider intervals (benchmarks/coverage.py).
    parts = ratios if processes > 1 else ratios[0].tensor_split(min(rounds, PARTS))
    # Medians, not means, because the machine is busy with something else in some rounds.
    value, medians = float(_median(ratios.flatten())), torch.stack([_median(part).log() for part in parts])
    # The shorter the parts, the more neighbouring parts are correlated, so their spread is too small and is corrected.
    spread = float(medians.std()) * (1 if processes > 1 else 1 + len(parts) / rounds)
    factor = math.exp(STUDENT[len(parts)] * spread / len(parts) ** 0.5)
    return Estimate(value, value / factor, value * factor)


def _median(values: Float[Tensor, "values"]) -> Float[Tensor, ""]:
    # Not torch.median, which returns the lower of the two middle values.
    return torch.quantile(values, 0.5)


def interleave(
    runs: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    clock: str = "wall",
    repeated: bool = True,
    is_enough: Callable[[Mapping[str, Float[Tensor, "runs"]]], bool] | None = None,
) -> dict[str, Float[Tensor, "runs"]]:
    """Times every run once per round and returns the seconds by name.

    `clock` is one of CLOCKS. Every second round runs in reverse order, so no run always follows the same one. Garbage
    is collected before the rounds, not during them.

    A model in use is called again and again, and its weights stay in the caches. So with `repeated`, every call that
    takes less than REPEATED seconds is timed after other, untimed calls of the same run. One such call is not enough.
    After calls of another model, the first calls of a ViT-Tiny in bfloat16 (OpenVINO, one image, one thread) take 5.7,
    5.5, 5.2, 5.0, 4.9, 4.9 ms. With two stages of merging, they take 6.1, 5.5, 4.6, 4.2, 4.0, 3.9 ms.

    Args:
        runs: The functions to time, by name.
        rounds: The number of rounds. Each run is timed once per round.
        warmup: The number of rounds before these, which do not count.
        clock: The name of the clock.
        repeated: Whether short calls are timed after other calls of the same run.

    Returns:
        The seconds of every round, by name, in float64.

    Raises:
        InvalidInput: There are no rounds or no runs.
        UnknownName: There is no such clock.
    """
    if rounds < 1 or warmup < 0 or not runs:
        raise InvalidInput(f"{rounds} rounds after {warmup} of {len(runs)} runs: give at least one round and one run.")
    if clock not in CLOCKS:
        raise UnknownName("clock", clock, CLOCKS)
    measure = CLOCKS[clock]
    last = dict.fromkeys(runs, math.inf)
    for _ in range(warmup):
        last = {name: measure(run) for name, run in runs.items()}
    # Either all runs are repeated or none.
    is_short = repeated and max(last.values()) < REPEATED
    before = {name: min(max(int(WARM / max(last[name], 1e-6)), 1), MOST_WARM) if is_short else 0 for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    # A collection in the middle of a round would add to the time of one run.
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for done in track(range(1, rounds + 1), "measuring latency"):
            for name, run in order:
                for _ in range(before[name]):
                    run()
                seconds[name].append(measure(run))
            order.reverse()
            looks = done >= max(FIRST_LOOK, rounds // 8) and done % LOOK_EVERY == 0
            if is_enough is not None and looks and is_enough(_tensors(seconds)):
                break
    finally:
        if collecting:
            gc.enable()
    return _tensors(seconds)


def _tensors(seconds: Mapping[str, Sequence[float]]) -> dict[str, Float[Tensor, "runs"]]:
    return {name: torch.tensor(times, dtype=torch.float64) for name, times in seconds.items()}


def _elapsed(now: Callable[[], float], run: Callable[[], object]) -> float:
    start = now()
    run()
    return now() - start


def _cuda_seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()  # events are timed by the device, so the synchronization is not measured
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


# "cpu" is the CPU time of the process on all its threads. On one thread, other load on the machine hardly affects it.
# On several threads it includes their waiting, so only "wall" is the latency that a user measures.
CLOCKS: dict[str, Callable[[Callable[[], object]], float]] = {
    "wall": partial(_elapsed, time.perf_counter),
    "cpu": partial(_elapsed, time.process_time),
    "cuda": _cuda_seconds,
}


@dataclass(frozen=True)
class LatencyComparison:
    """The latency of two models for the same batch, and the conditions of the measurement.

    `faster` is the reference's time over the candidate's. If the `unchanged` model, in the candidate's runtime and
    precision, was measured too, `faster` has two factors. `by_runtime` is the reference's time over the unchanged
    model's, and `by_compression` is the unchanged model's time over the candidate's. Each is a median over rounds, so
    their product is `faster` up to the noise of the rounds.
    """

    candidate: Timing
    reference: Timing
    faster: Estimate
    batch: int
    image_shape: tuple[int, ...]
    rounds: int
    clock: str
    conditions: Conditions
    threads: int
    hardware: str
    torch_version: str
    processes: int = 1
    unchanged: Timing | None = None
    by_runtime: Estimate | None = None
    by_compression: Estimate | None = None
    taken: float | None = None
    """The average number of processors that other processes took from the threads, or None if it is unknown."""

    @property
    def interval(self) -> str:
        """How the intervals of the ratios are computed."""
        parts = f"{PARTS} consecutive parts of one run" if self.processes == 1 else f"{self.processes} processes"
        return f"t over the medians of {parts}"

    def __str__(self) -> str:
        """Formats the speed with its interval, its factors, its conditions and the median times."""
        reference, candidate = 1000 * self.reference.median, 1000 * self.candidate.median
        factors = ""
        if self.by_runtime is not None and self.by_compression is not None:
            factors = f" = {factors_text(self.by_runtime.value, self.by_compression.value)}"
        return (
            f"{speed_text(self.faster.value)} [{self.faster.low:.2f}, {self.faster.high:.2f}]{factors} at batch "
            f"{self.batch} on {self.threads} thread{'s' * (self.threads != 1)}: {reference:.1f} -> {candidate:.1f} ms, "
            f"{self.hardware}"
        ) + ("" if not is_busy(self.taken) else f"; {busy_text(self.taken)}")


def is_busy(taken: float | None) -> bool:
    """Whether the machine was busy, given that other processes took `taken` processors from the measurement."""
    return taken is not None and taken > BUSY


def busy_text(taken: float | None) -> str:
    """Formats a warning that the machine was busy during a measurement."""
    return f"measured beside other processes, which took {taken:.1f} of the processors that it needs"


def speed_text(speed: float) -> str:
    """Formats a speed relative to the original: "1.62x faster", or "0.94x the speed" for a slower model."""
    return f"{speed:.2f}x {'faster' if speed >= 1 else 'the speed'}"


def factors_text(by_runtime: float, by_compression: float, runtime: str = "attnrx's kernels") -> str:
    """Formats the factors of a speed: "2.08x by attnrx's kernels x 1.06x by compression"."""
    return f"{by_runtime:.2f}x by {runtime} x {by_compression:.2f}x by compression"


@dataclass(frozen=True)
class LatencyProtocol:
    """How latency is measured.

    The models run in turns for `rounds` rounds, after `warmup` rounds that do not count. A short call is timed after
    other calls of the same model, which do not count either (`interleave`). `clock` is "wall", "cpu" (the CPU time of
    the process, for busy machines) or "cuda" (events of the stream). None means "cuda" on a CUDA device and "wall"
    elsewhere.

    If `processes` is above 1, the rounds are divided among `processes` new processes, and the intervals include the
    differences between them. Models that cannot be pickled are measured in this process instead, and
    `LatencyComparison.processes` is then 1.

    If `enough` is not None, the rounds end once every speed's interval reaches at most this share of the speed to
    either side.
    """

    conditions: Conditions = field(default_factory=Conditions)
    rounds: int = 30
    warmup: int = 5
    clock: str | None = None
    processes: int = 1
    enough: float | None = None

    def __post_init__(self):
        # An interval needs two rounds, and the first pass is never typical, so there is a warmup.
        processes, shares = whole(1, max(STUDENT)), optional(number(0.0, 1.0, "a share of the speed, e.g. 0.01"))
        fields = {"clock": optional(one_of(*CLOCKS)), "processes": processes, "enough": shares}
        require_fields(self, rounds=whole(2), warmup=COUNT, **fields)

    @property
    def resolved_clock(self) -> str:
        """The name of the clock. Without a stated clock, it depends on the device."""
        return self.clock or ("cuda" if self.conditions.on_cuda else "wall")


@checked()
def compare_latency(
    candidate: nn.Module,
    reference: nn.Module,
    images: ImageBatch,
    protocol: LatencyProtocol | None = None,
    unchanged: nn.Module | None = None,
) -> LatencyComparison:
    """Measures the forward pass of both models on the images. Neither model is changed.

    Args:
        candidate: The model to measure.
        reference: The model to compare it with.
        images: A batch. Every pass processes all of it.
        protocol: The conditions, rounds and clock. The default is `LatencyProtocol()`.
        unchanged: The original model in the runtime of the candidate, e.g. the reference in attnrx's kernels or its own
            file. With it, the result also contains the two factors of the speed.

    Raises:
        InvalidInput: There are no images.
    """
    return compare_latencies({"candidate": candidate}, reference, images, protocol, unchanged)["candidate"]


@checked()
def compare_latencies(
    candidates: Mapping[str, nn.Module],
    reference: nn.Module,
    images: ImageBatch,
    protocol: LatencyProtocol | None = None,
    unchanged: nn.Module | None = None,
) -> dict[str, LatencyComparison]:
    """Measures the forward pass of several candidates, one reference, and the `unchanged` model in turns.

    No model is changed.

    Raises:
        InvalidInput: There are no candidates, one has no name, or there are no images.
    """
    if not candidates or not all(name.strip() for name in candidates):
        raise InvalidInput(f"candidates {list(candidates)}: give at least one to measure, and each a name.")
    if not len(images):
        raise InvalidInput("measuring latency needs at least one image; the batch is empty.")
    protocol = protocol or LatencyProtocol()
    models: dict[str, nn.Module] = {**candidates, REFERENCE: reference}
    # If the unchanged model is also a candidate, it is timed once, and its factor by compression is 1.
    same = next((name for name, model in models.items() if model is unchanged), UNCHANGED)
    if unchanged is not None:
        models[same] = unchanged
    runs = _runs(models, images, protocol)
    if protocol.processes > 1 and is_busy(_taken(runs)):  # evidence is then measured once more, and the better one kept
        runs = min(runs, _runs(models, images, protocol), key=lambda found: _taken(found) or 0.0)
    rounds = min(len(run[0][REFERENCE]) for run in runs)  # a process may have ended earlier than another
    seconds = {name: torch.stack([run[0][name][:rounds] for run in runs]) for name in models}  # [processes, rounds]
    if same in seconds:
        seconds[UNCHANGED] = seconds[same]
    original, middle = seconds[REFERENCE], seconds.get(UNCHANGED)
    return {
        name: LatencyComparison(
            candidate=Timing.of(own.flatten()), reference=Timing.of(original.flatten()),
            faster=ratio_of(original, own), batch=len(images), image_shape=tuple(images.shape[1:]), rounds=own.numel(),
            clock=protocol.resolved_clock, conditions=protocol.conditions, threads=runs[0][1],
            hardware=protocol.conditions.hardware, torch_version=torch.__version__, processes=len(runs),
            unchanged=None if middle is None else Timing.of(middle.flatten()),
            by_runtime=None if middle is None else ratio_of(original, middle),
            by_compression=None if middle is None else ratio_of(middle, own), taken=_taken(runs),
        )
        for name, own in seconds.items()
        if name in candidates
    }  # fmt: skip


# Every model's seconds in the rounds of one process, the number of threads, and the processors that they lacked.
_Run = tuple[dict[str, Float[Tensor, "rounds"]], int, float | None]


def _taken(runs: Sequence[_Run]) -> float | None:
    known = [taken for _, _, taken in runs if taken is not None]
    return fmean(known) if known else None


def _runs(models: Mapping[str, nn.Module], images: Tensor, protocol: LatencyProtocol) -> list[_Run]:
    """Measures the models one after another in `protocol.processes` new processes, or in this process."""
    if protocol.processes > 1:
        part = replace(protocol, rounds=max(-(-protocol.rounds // protocol.processes), 2), processes=1)
        # Some models cannot be pickled, because no module defines their class, or because a runtime has opened them as
        # files. If the measurement itself raised an error, it is raised again below.
        with suppress(NotSupported), shared_subprocess() as process:
            calls = process.calls(protocol.processes, _run, models, images, part)
            return list(track(calls, "measuring latency, processes", protocol.processes))
    return [_run(models, images, protocol)]


def _run(models: Mapping[str, nn.Module], images: Tensor, protocol: LatencyProtocol) -> _Run:
    conditions = protocol.conditions
    with conditions.held():
        batch = conditions.prepare_images(images)
        runs: dict[str, Callable[[], object]] = {
            name: partial(conditions.prepare(model), batch) for name, model in models.items()
        }
        threads, load, enough = torch.get_num_threads(), Load(), protocol.enough
        timing: dict[str, Any] = {"warmup": protocol.warmup, "clock": protocol.resolved_clock}
        if enough is not None:
            timing["is_enough"] = partial(_are_precise, enough)
        return interleave(runs, rounds=protocol.rounds, **timing), threads, load.taken(threads)


def _are_precise(enough: float, seconds: Mapping[str, Float[Tensor, "runs"]]) -> bool:
    """Whether the interval of every speed relative to the reference reaches at most `enough` of it to either side."""
    speeds = (ratio_of(seconds[REFERENCE], own) for name, own in seconds.items() if name != REFERENCE)
    return all(max(each.high - each.value, each.value - each.low) <= enough * each.value for each in speeds)


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the largest amount of CPU memory that `run` allocates, beyond the memory that was in use before."""
    # By default the profiler's library logs its start to stderr, and an error on a CPU-only machine.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result  # kept until here, because the output of the run is part of its peak
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    # Events of operations contain only their net memory, but the allocator's events include temporary allocations.
    events = sorted(results.events(), key=lambda event: event.start_ns())
    # The changes are signed and in order of time, so the peak is the largest partial sum.
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]  # type: ignore[attr-defined]
    return max(accumulate(changes), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """The bytes of the weights, and the peak bytes of activations and work space in one forward pass."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """The bytes that must be free to run the model."""
        return self.weights + self.activations


@dataclass(frozen=True)
class MemoryComparison:
    """The memory of two models for the same batch of images."""

    candidate: PeakMemory
    reference: PeakMemory
    batch: int
    conditions: Conditions
    hardware: str

    @property
    def ratio(self) -> float:
        return self.candidate.total / max(self.reference.total, 1)


@checked()
def compare_memory(
    candidate: nn.Module, reference: nn.Module, images: ImageBatch, conditions: Conditions | None = None
) -> MemoryComparison:
    """Measures a forward pass of both models on the images, one after the other. Neither model is changed.

    Raises:
        InvalidInput: There are no images.
    """
    if not len(images):
        raise InvalidInput("measuring memory needs at least one image; the batch is empty.")
    conditions = replace(conditions or Conditions(), graphs=False)  # a graph keeps the memory of all its kernels
    with conditions.held():
        batch = conditions.prepare_images(images)
        candidate_peak, reference_peak = (_peak(model, batch, conditions) for model in (candidate, reference))
    return MemoryComparison(candidate_peak, reference_peak, len(images), conditions, conditions.hardware)


def _peak(model: nn.Module, batch: Tensor, conditions: Conditions) -> PeakMemory:
    run = partial(conditions.prepare(model), batch)
    run()  # the first pass also fills caches and compiles
    if conditions.on_cuda:
        # Otherwise kernels that are still running would free or allocate memory inside the measurement.
        torch.cuda.synchronize(conditions.device)
        torch.cuda.reset_peak_memory_stats(conditions.device)
        baseline = torch.cuda.memory_allocated(conditions.device)
        run()
        torch.cuda.synchronize(conditions.device)
        activations = torch.cuda.max_memory_allocated(conditions.device) - baseline
    else:
        activations = peak_bytes(run)
    # `prepare` casts all weights, so they have one size.
    size = PRECISIONS[conditions.precision].itemsize
    return PeakMemory(size * sum(parameter.numel() for parameter in model.parameters()), activations)
