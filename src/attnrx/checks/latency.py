"""Latency and memory of the candidate relative to the reference, measured interleaved on this machine."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.costs import Conditions, LatencyProtocol, compare_latency, compare_memory
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.runtime import processes
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Latency(Check):
    """The ratio of forward times, candidate over reference, interleaved, and of peak memory; below 1 is better.

    `batch` is the batch size. The device is that of the comparison, the other conditions are those of the protocol.
    `most_ratio` limits the ratio of times; on a busy machine the interval is wide and the claim undecided.
    """

    name: ClassVar[str] = "latency"
    batch: int = 32
    protocol: LatencyProtocol = field(default_factory=LatencyProtocol)
    most_ratio: float | None = None

    def __post_init__(self):
        if self.batch < 1 or (self.most_ratio is not None and self.most_ratio <= 0):
            raise InvalidInput(
                f"Latency(batch={self.batch}, most_ratio={self.most_ratio}): give an image and a ratio above 0."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Times both models, then measures their memory; with several processes only rank 0 measures."""
        if not comparison.together:
            return self._measured(comparison)
        return processes.from_first(lambda: self._measured(comparison))

    def _measured(self, comparison: Comparison) -> tuple[Finding, ...]:
        images = _images(comparison, self.batch)
        conditions = replace(self.protocol.conditions, device=str(comparison.device))
        return (
            self._latency(comparison, images, replace(self.protocol, conditions=conditions)),
            self._memory(comparison, images, conditions),
        )

    def _latency(self, comparison: Comparison, images: Tensor, protocol: LatencyProtocol) -> Finding:
        measured = compare_latency(comparison.candidate, comparison.reference, images, protocol)
        ratio = measured.ratio
        return Finding(
            self.name,
            f"time of a forward pass of {len(images)}, candidate over reference",
            ratio.value,
            "x",
            **judged(ratio.value, self.most_ratio, (ratio.low, ratio.high), measured.rounds, at_least=False),
            seed=protocol.seed,
            details={"quantity": "latency", **asdict(measured), "image_shape": list(measured.image_shape)},
        )

    def _memory(self, comparison: Comparison, images: Tensor, conditions: Conditions) -> Finding:
        measured = compare_memory(comparison.candidate, comparison.reference, images, conditions)
        details: dict[str, Any] = {"quantity": "memory", **asdict(measured)}
        claim = f"peak memory of a forward pass of {len(images)}, candidate over reference"
        return Finding(self.name, claim, measured.ratio, "x", n=1, details=details)


def _images(comparison: Comparison, count: int) -> Float[Tensor, "batch channels height width"]:
    """Returns the first `count` images, repeated if there are fewer: latency depends on their number only."""
    first = next(iter(comparison.data.batches(min(count, len(comparison.data)), device=comparison.device))).images
    return first[torch.arange(count, device=first.device) % len(first)]
