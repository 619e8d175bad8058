"""The memory of a forward pass: the weights, and the peak above them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.costs.conditions import PRECISIONS, Conditions

MEMORY_EVENT = "[memory]"


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the largest memory on a CPU, above that held before, while `run` runs."""
    # By default the profiler's library logs its start to stderr, and an error on a CPU-only machine.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    del result  # kept alive until here: the output of the run is part of its peak
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    # The events of an operation contain its net memory only; the allocator's events include temporary allocations.
    events = sorted(results.events(), key=lambda event: event.start_ns())
    # Signed changes in the order of time: the peak is the largest partial sum.
    changes = [event.nbytes() for event in events if event.name() == MEMORY_EVENT]  # type: ignore[attr-defined]
    return max(accumulate(changes), default=0)


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of the weights, and of the activations and work space of one forward pass at its peak."""

    weights: int
    activations: int

    @property
    def total(self) -> int:
        """The memory that must be free to run the model."""
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


def compare_memory(
    candidate: nn.Module, reference: nn.Module, images: ImageBatch, conditions: Conditions | None = None
) -> MemoryComparison:
    """Measures a forward pass of both models on the images, one after the other; neither is changed.

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
        # Kernels still running would free or allocate memory inside the measurement.
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
