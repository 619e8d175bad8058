"""The memory of a forward pass: the weights, and the peak above them.

On CUDA the peak is the allocator's own record. On the CPU it is the running total of every allocation and release
that torch's profiler recorded during one pass, so it is exact, repeatable to the byte on one thread, and excludes
allocations of other libraries. It is not the resident size of the process, which depends on everything that ran before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from attnrx.costs.conditions import PRECISIONS, Conditions
from attnrx.costs.profiling import profiled
from attnrx.errors import InvalidInput
from attnrx.shapes import Float, Tensor


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
        """The candidate's total memory over the reference's."""
        return self.candidate.total / max(self.reference.total, 1)


def compare_memory(
    candidate: nn.Module,
    reference: nn.Module,
    images: Float[Tensor, "batch channels height width"],
    conditions: Conditions | None = None,
) -> MemoryComparison:
    """Measures a forward pass of both models on the images, one after the other; neither is changed."""
    if not len(images):
        raise InvalidInput("measuring memory needs at least one image; the batch is empty.")
    conditions = conditions or Conditions()
    with conditions.held():
        batch = conditions.place_images(images)
        own, other = (_peak(model, batch, conditions) for model in (candidate, reference))
    return MemoryComparison(own, other, len(images), conditions, conditions.hardware)


def _peak(model: nn.Module, batch: Tensor, conditions: Conditions) -> PeakMemory:
    run = partial(conditions.place(model), batch)
    run()  # the first pass also fills caches and compiles
    activations = _cuda_peak(run, conditions.device) if conditions.on_cuda else profiled(run).peak_bytes
    size = PRECISIONS[conditions.precision].itemsize
    return PeakMemory(size * sum(parameter.numel() for parameter in model.parameters()), activations)


def _cuda_peak(run: Callable[[], object], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
