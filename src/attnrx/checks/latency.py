"""Latency and memory of the candidate relative to the reference, measured interleaved on this machine."""

from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.costs import LatencyProtocol, compare_latency, compare_memory
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.runtime import processes


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
        if self.batch < 1 or (self.most_ratio is not None and not self.most_ratio > 0):
            raise InvalidInput(
                f"Latency(batch={self.batch}, most_ratio={self.most_ratio}): give an image and a ratio above 0."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Times both models, then measures their memory; with several processes only rank 0 measures."""
        # Several processes that time at once would disturb each other.
        if not comparison.together:
            return self._measured(comparison)
        return processes.from_first(lambda: self._measured(comparison))

    def _measured(self, comparison: Comparison) -> tuple[Finding, ...]:
        # Latency depends on the number of images only: they are repeated if there are fewer.
        available = min(self.batch, len(comparison.data))
        first = next(iter(comparison.data.batches(available, device=comparison.device))).images
        images = first[torch.arange(self.batch, device=first.device) % len(first)]
        conditions = replace(self.protocol.conditions, device=str(comparison.device))
        models = comparison.candidate, comparison.reference, images
        times = compare_latency(*models, replace(self.protocol, conditions=conditions))
        memory = compare_memory(*models, conditions)
        ratio = times.ratio
        return (
            Finding(
                self.name,
                f"time of a forward pass of {self.batch}, candidate over reference",
                ratio.value,
                "x",
                **judged(ratio.value, self.most_ratio, (ratio.low, ratio.high), times.rounds, at_least=False),
                seed=self.protocol.seed,
                details={"quantity": "latency", **asdict(times), "image_shape": list(times.image_shape)},
            ),
            Finding(
                self.name,
                f"peak memory of a forward pass of {self.batch}, candidate over reference",
                memory.ratio,
                "x",
                n=1,
                details={"quantity": "memory", **asdict(memory)},
            ),
        )
