"""Measures and compares the latency and the memory of models under the same conditions."""

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
# How many passes run before a CUDA graph is recorded. Kernel libraries allocate their memory in the first passes.
PASSES_BEFORE = 3
# STUDENT contains the 97.5 % quantiles of Student's t, by the number of medians. PARTS is how many consecutive parts a
# run is divided into for its interval.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
PARTS = 4
# A measurement that ends once speeds are precise checks them every LOOK_EVERY rounds. The first check is in round
# FIRST_LOOK, or after an eighth of all rounds if that is later.
LOOK_EVERY, FIRST_LOOK = 4, 16
# How many processes measure the latency for evidence. Times differ more between processes than between the rounds of
# one process, and the rounds of one process are correlated. With only four processes, the intervals of 32 rounds are
# 1.3 to 1.7 times as wide (benchmarks/coverage.py).
PROCESSES = 8
# The time of a call that takes less than REPEATED seconds depends on what the processor's caches contain. So untimed
# calls of the same model run before the timed call, for about WARM seconds, but at most MOST_WARM calls.
REPEATED, WARM, MOST_WARM = 0.1, 0.06, 6
# A machine counts as busy if other processes use more than this number of processors on average.
BUSY = 0.2
# The names of the reference and of the unchanged model in a run. Candidates cannot have these names, because a
# candidate's name must not be blank.
REFERENCE, UNCHANGED = "", " "


class RecordedCalls:
    """A wrapper that runs a model on a CUDA device as one CUDA graph, for inference.

    For few images or small layers, launching the kernels one by one takes longer than running them. The first call with
    a new input shape or dtype records a graph. Every later call copies its inputs into the recorded inputs and replays
    the graph, which overwrites the previous outputs. Weights may change in place. If you replace a weight by another
    tensor, the recorded graph still uses the old tensor.
    """

    def __init__(self, model: Callable[[Tensor], Any]):
        self.model = model
        self._recorded: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}

    @torch.inference_mode()
    def __call__(self, images: Float[Tensor, "batch *sizes"]) -> Any:
        """Returns the model's outputs. The next call with this input shape and dtype overwrites them.

        Raises:
            NotSupported: The model does something that a graph cannot record, e.g. it waits for the device.
        """
        key = images.shape, images.dtype, images.device
        if key not in self._recorded:
            self._recorded[key] = self._record(images.clone())
        graph, inputs, outputs = self._recorded[key]
        inputs.copy_(images)
        graph.replay()
        return outputs

    def _record(self, inputs: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        # PyTorch requires that the passes before the recording run on another stream.
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
    """The conditions under which models are measured. All compared models are measured under the same conditions.

    Attributes:
        device: The device on which models run, e.g. "cpu" or "cuda".
        precision: The dtype of weights and images: "float32", "bfloat16" or "float16".
        threads: The number of CPU threads, or None to keep the current number.
        compiled: Whether models run through torch.compile. Its caches are cleared before each measurement, so that
            earlier models do not count towards the recompilation limit.
        graphs: Whether each model runs as one CUDA graph (`RecordedCalls`).
        plain: Whether models run in their library's code instead of attnrx's kernels.
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
        """Returns a copy of the model in evaluation mode, prepared for these conditions."""
        # Inference mode is disabled for the copy. Values derived from inference tensors could not be cached.
        with torch.inference_mode(mode=False):
            clone = copy_module(model).eval().to(self.device, PRECISIONS[self.precision])
        # fullgraph=True raises an error if a part would fall back to eager, which would be timed as compiled code.
        # dynamic=False specializes the kernels, because only one input shape is measured.
        ready = torch.compile(clone, fullgraph=True, dynamic=False) if self.compiled else clone
        return RecordedCalls(ready) if self.graphs else ready

    def prepare_images(self, images: ImageBatch) -> ImageBatch:
        return images.to(self.device, PRECISIONS[self.precision])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Sets the number of threads and disables gradients within the context, and restores them afterwards."""
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
        """Whether models run in attnrx's kernels (`attnrx.accelerate`), which require eager PyTorch on a CPU."""
        return not (self.on_cuda or self.compiled or self.plain)

    @property
    def hardware(self) -> str:
        return device_name(self.device)


@dataclass(frozen=True)
class Timing:
    """The time of a model's forward pass in seconds: the median, and the 10th (`low`) and 90th (`high`) percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Float[Tensor, "runs"]) -> "Timing":
        return cls(*torch.quantile(seconds, seconds.new_tensor([0.5, 0.1, 0.9])).tolist())


def ratio_of(seconds: Float[Tensor, "*processes runs"], reference: Float[Tensor, "*processes runs"]) -> Estimate:
    """Returns the median of `seconds / reference` over all rounds, with its 95 % interval.

    The ratio is computed within each round. Other load on the machine slows both models, so it mostly cancels in the
    ratio. The interval is a t interval on a logarithmic scale. With several processes, the interval is computed from
    the median of each process, and covers the differences between processes. With one process, it is computed from the
    medians of four consecutive parts of the run (batch means). If you measure again in another process, the ratio may
    then lie outside the interval.

    Raises:
        InvalidInput: There are fewer than two rounds.
    """
    ratios = (seconds / reference).double().reshape(-1, seconds.shape[-1])
    processes, rounds = ratios.shape
    if rounds < 2:
        raise InvalidInput(f"{rounds} round: an interval needs at least two.")
    # Other load lasts for many rounds, so the ratios of neighbouring rounds are correlated. A bootstrap of single
    # rounds would ignore this, and its 95 % interval would cover the ratio in only 60 % of the runs. Quarters of a run
    # are nearly independent. Fewer parts would give much wider intervals (benchmarks/coverage.py).
    parts = ratios if processes > 1 else ratios[0].tensor_split(min(rounds, PARTS))
    # Medians ignore the few rounds in which the machine was busy with another task.
    value, medians = float(_median(ratios.flatten())), torch.stack([_median(part).log() for part in parts])
    # Neighbouring parts are more correlated if they are short. Their spread is then too small, so it is increased.
    spread = float(medians.std()) * (1 if processes > 1 else 1 + len(parts) / rounds)
    factor = math.exp(STUDENT[len(parts)] * spread / len(parts) ** 0.5)
    return Estimate(value, value / factor, value * factor)


def _median(values: Float[Tensor, "values"]) -> Float[Tensor, ""]:
    # torch.median would return the lower of the two middle values, and not their mean.
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
    """Times several functions in alternation, each once per round, and returns their times in seconds.

    Every second round calls the functions in reverse order, so that no function always follows the same other function.
    The garbage collector runs before the rounds, but not during them.

    A deployed model is called repeatedly, so its weights stay in the processor's caches. To measure this case, untimed
    calls of the same function run before each timed call, if `repeated` is true and calls are short. One untimed call
    is not enough. For example, after calls of another model, the first six calls of a ViT-Tiny in bfloat16 (OpenVINO,
    one image, one thread) take 5.7, 5.5, 5.2, 5.0, 4.9 and 4.9 ms. With two stages of token merging, the first six
    calls take 6.1, 5.5, 4.6, 4.2, 4.0 and 3.9 ms.

    Args:
        runs: The functions to time, by name.
        rounds: How many times each function is timed.
        warmup: The number of untimed rounds before the timed rounds.
        clock: The name of the clock: "wall", "cpu" or "cuda".
        repeated: Whether untimed calls run before each timed call, if all calls take less than `REPEATED` seconds.
        is_enough: A function that is called with the times so far. If it returns True, the measurement ends early.

    Returns:
        For every name, the seconds of each round in float64.

    Raises:
        InvalidInput: There are no rounds or no runs.
        UnknownName: No clock has this name.
    """
    if rounds < 1 or warmup < 0 or not runs:
        raise InvalidInput(f"{rounds} rounds after {warmup} of {len(runs)} runs: give at least one round and one run.")
    if clock not in CLOCKS:
        raise UnknownName("clock", clock, CLOCKS)
    measure = CLOCKS[clock]
    last = dict.fromkeys(runs, math.inf)
    for _ in range(warmup):
        last = {name: measure(run) for name, run in runs.items()}
    # Untimed calls run before all functions or before none of them, depending on the slowest function.
    is_short = repeated and max(last.values()) < REPEATED
    before = {name: min(max(int(WARM / max(last[name], 1e-6)), 1), MOST_WARM) if is_short else 0 for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    # A garbage collection in the middle of a round would add to the time of one function.
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
    start.record()  # the device records the times of events, so the synchronization is not measured
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


# "cpu" measures the CPU time of the process over all threads. With one thread, other load on the machine hardly affects
# it. With several threads, it includes the time that threads spend waiting. Only "wall" is the latency that users see.
CLOCKS: dict[str, Callable[[Callable[[], object]], float]] = {
    "wall": partial(_elapsed, time.perf_counter),
    "cpu": partial(_elapsed, time.process_time),
    "cuda": _cuda_seconds,
}


@dataclass(frozen=True)
class LatencyComparison:
    """The latency of two models for the same batch, and the conditions of the measurement.

    `faster` is the reference's time divided by the candidate's time. If the original model was also measured in the
    candidate's runtime and precision (`unchanged`), `faster` is split into two factors. `by_runtime` is the reference's
    time divided by the unchanged model's time. `by_compression` is the unchanged model's time divided by the
    candidate's time. Because each ratio is a median over rounds, the product of the two factors only approximates
    `faster`.
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
    """How many processors, on average, other processes took from the measurement's threads, or None if unknown."""

    @property
    def interval(self) -> str:
        """A description of how the intervals of the ratios were computed."""
        parts = f"{PARTS} consecutive parts of one run" if self.processes == 1 else f"{self.processes} processes"
        return f"t over the medians of {parts}"

    def __str__(self) -> str:
        """Returns one line with the speed, its interval and factors, the number of threads and the median times."""
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
    """Whether the machine was too busy for a reliable measurement.

    `taken` is the average number of processors that other processes took from the measurement, or None if unknown.
    """
    return taken is not None and taken > BUSY


def busy_text(taken: float | None) -> str:
    """Returns a warning that other processes took `taken` processors, on average, from a measurement."""
    return f"measured beside other processes, which took {taken:.1f} of the processors that it needs"


def speed_text(speed: float) -> str:
    """Returns a speed ratio as text, e.g. "1.62x faster", or "0.94x the speed" for a slower model."""
    return f"{speed:.2f}x {'faster' if speed >= 1 else 'the speed'}"


def factors_text(
    by_runtime: float, by_compression: float, runtime: str = "attnrx's kernels", change: str = "compression"
) -> str:
    """Returns the two factors of a speedup as text, e.g. "2.08x by attnrx's kernels x 1.06x by compression"."""
    return f"{by_runtime:.2f}x by {runtime} x {by_compression:.2f}x by {change}"


@dataclass(frozen=True)
class LatencyProtocol:
    """How latency is measured. The models run in alternation, each once per round (see `interleave`).

    Attributes:
        conditions: The device, precision, threads and compilation.
        rounds: How many times each model is timed.
        warmup: The number of untimed rounds before the timed rounds.
        clock: "wall", "cpu" (the CPU time of the process, for busy machines) or "cuda" (events of the CUDA stream).
            None means "cuda" on a CUDA device and "wall" on other devices.
        processes: The number of new processes among which the rounds are divided. With more than one process, the
            intervals cover differences between processes. Models that cannot be pickled are measured in this process
            instead, and `LatencyComparison.processes` is then 1.
        enough: A fraction of the highest measured speed. The measurement ends early once every speed differs from both
            ends of its interval by at most this much. None means that all rounds run.
    """

    conditions: Conditions = field(default_factory=Conditions)
    rounds: int = 30
    warmup: int = 5
    clock: str | None = None
    processes: int = 1
    enough: float | None = None

    def __post_init__(self):
        # An interval needs at least two rounds. Intervals are tabulated for at most max(STUDENT) processes.
        processes, shares = whole(1, max(STUDENT)), optional(number(0.0, 1.0, "a share of the speed, e.g. 0.01"))
        fields = {"clock": optional(one_of(*CLOCKS)), "processes": processes, "enough": shares}
        require_fields(self, rounds=whole(2), warmup=COUNT, **fields)

    @property
    def resolved_clock(self) -> str:
        """The name of the clock. If `clock` is None, the device determines it."""
        return self.clock or ("cuda" if self.conditions.on_cuda else "wall")


@checked()
def compare_latency(
    candidate: nn.Module,
    reference: nn.Module,
    images: ImageBatch,
    protocol: LatencyProtocol | None = None,
    unchanged: nn.Module | None = None,
) -> LatencyComparison:
    """Compares how long the forward passes of two models take for the same batch. The models do not change.

    Args:
        candidate: The model to measure.
        reference: The model to compare it with.
        images: The batch that every forward pass processes.
        protocol: The conditions, the number of rounds and the clock. The default is `LatencyProtocol()`.
        unchanged: The original model in the candidate's runtime, e.g. with attnrx's kernels or exported to a file. If
            you pass it, the speedup is also split into the factors `by_runtime` and `by_compression`.

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
    """Compares the latency of several candidates with one reference. All models run in alternation.

    See `compare_latency` for the arguments. No model is changed.

    Returns:
        A comparison with the reference for every candidate, keyed by the candidate's name.

    Raises:
        InvalidInput: There are no candidates, a candidate has no name, or there are no images.
    """
    if not candidates or not all(name.strip() for name in candidates):
        raise InvalidInput(f"candidates {list(candidates)}: give at least one to measure, and each a name.")
    if not len(images):
        raise InvalidInput("measuring latency needs at least one image; the batch is empty.")
    protocol = protocol or LatencyProtocol()
    models: dict[str, nn.Module] = {**candidates, REFERENCE: reference}
    # If the unchanged model is also a candidate, it is timed only once, and its factor by compression is 1.
    same = next((name for name, model in models.items() if model is unchanged), UNCHANGED)
    if unchanged is not None:
        models[same] = unchanged
    runs = _runs(models, images, protocol)
    if protocol.processes > 1 and is_busy(_taken(runs)):  # measures evidence again, and keeps the less disturbed runs
        runs = min(runs, _runs(models, images, protocol), key=lambda found: _taken(found) or 0.0)
    rounds = min(len(run[0][REFERENCE]) for run in runs)  # processes may end after different numbers of rounds
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


# The measurements of one process: each model's seconds per round, the number of threads, and how many processors other
# processes took from them.
_Run = tuple[dict[str, Float[Tensor, "rounds"]], int, float | None]


def _taken(runs: Sequence[_Run]) -> float | None:
    known = [taken for _, _, taken in runs if taken is not None]
    return fmean(known) if known else None


def _runs(models: Mapping[str, nn.Module], images: Tensor, protocol: LatencyProtocol) -> list[_Run]:
    """Measures the models in `protocol.processes` new processes, one after another.

    If `protocol.processes` is 1, or if the models cannot be pickled, they are measured in this process.
    """
    if protocol.processes > 1:
        part = replace(protocol, rounds=max(-(-protocol.rounds // protocol.processes), 2), processes=1)
        # Models that cannot be pickled are measured in this process below. Their class may not be in a module, or a
        # runtime may have opened them as files. An error in the measurement itself is raised again below.
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
    """Whether every speed differs from both ends of its interval by at most the fraction `enough` of the top speed."""
    speeds = [ratio_of(seconds[REFERENCE], own) for name, own in seconds.items() if name != REFERENCE]
    # A slow model's speed varies most, and matters least.
    most = enough * max(each.value for each in speeds)
    return all(max(each.high - each.value, each.value - each.low) <= most for each in speeds)


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the peak increase in CPU memory, in bytes, during a call of `run`."""
    # By default, the profiler's library logs its start to stderr, and an error if the machine has no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result  # the output is kept until here, because it is part of the peak
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    # The allocator's events include temporary allocations. Events of operations contain only the net change.
    events = sorted(results.events(), key=lambda event: event.start_ns())
    # Allocations are positive and releases negative. In the order of time, the peak is the largest partial sum.
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]  # type: ignore[attr-defined]
    return max(accumulate(changes), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """The memory of a model in bytes: its weights, and the peak of activations and workspace in a forward pass."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """How many bytes of memory the model needs to run."""
        return self.weights + self.activations


@dataclass(frozen=True)
class MemoryComparison:
    """The memory that two models need for the same batch of images."""

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
    """Compares the memory that two models need for a forward pass of these images. The models do not change.

    Raises:
        InvalidInput: There are no images.
    """
    if not len(images):
        raise InvalidInput("measuring memory needs at least one image; the batch is empty.")
    conditions = replace(conditions or Conditions(), graphs=False)  # CUDA graphs keep the memory of all their kernels
    with conditions.held():
        batch = conditions.prepare_images(images)
        candidate_peak, reference_peak = (_peak(model, batch, conditions) for model in (candidate, reference))
    return MemoryComparison(candidate_peak, reference_peak, len(images), conditions, conditions.hardware)


def _peak(model: nn.Module, batch: Tensor, conditions: Conditions) -> PeakMemory:
    run = partial(conditions.prepare(model), batch)
    run()  # the first pass also fills caches and compiles
    if conditions.on_cuda:
        # Kernels that are still running would free or allocate memory during the measurement, so they must finish.
        torch.cuda.synchronize(conditions.device)
        torch.cuda.reset_peak_memory_stats(conditions.device)
        baseline = torch.cuda.memory_allocated(conditions.device)
        run()
        torch.cuda.synchronize(conditions.device)
        activations = torch.cuda.max_memory_allocated(conditions.device) - baseline
    else:
        activations = peak_bytes(run)
    # `prepare` casts all weights to one dtype, so all have the same size in bytes.
    size = PRECISIONS[conditions.precision].itemsize
    return PeakMemory(size * sum(parameter.numel() for parameter in model.parameters()), activations)
