"""Speed and memory of the candidate relative to the reference, measured interleaved on this machine."""

from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.costs import LatencyProtocol, compare_latency, compare_memory
from attnrx.costs.latency import INTERVAL
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.models import family_of
from attnrx.runtime import processes


@dataclass(frozen=True)
class Latency(Check):
    """The speed of a forward pass relative to the reference, measured interleaved, and the ratio of peak memory.

    `batch` is the batch size. The device is that of the comparison, the other conditions are those of the protocol.
    `faster` is the least speed, e.g. 1.5; on a busy machine the interval is wide and the claim undecided. With
    `library` the reference is the model as implemented by its own library.
    """

    name: ClassVar[str] = "latency"
    batch: int = 32
    protocol: LatencyProtocol = field(default_factory=LatencyProtocol)
    faster: float | None = None
    library: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.batch < 1 or (self.faster is not None and not self.faster > 0):
            raise InvalidInput(
                f"Latency(batch={self.batch}, faster={self.faster}): give an image and a speed above 0, e.g. 1.5."
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
        reference = comparison.reference
        # The gain by attnrx's kernels is part of the speed that a user of the library sees.
        if self.library:
            reference = family_of(reference).library_model(reference)
        models = comparison.candidate, reference, images
        times = compare_latency(*models, replace(self.protocol, conditions=conditions))
        memory = compare_memory(*models, conditions)
        faster, name = times.faster, "the original in its own library" if self.library else "the reference"
        speed = Finding(
            self.name,
            f"speed of a forward pass of {self.batch}, relative to {name}",
            faster.value,
            "x",
            **judged(faster.value, self.faster, (faster.low, faster.high), times.rounds, at_least=True),
            details={
                "quantity": "speed",
                "interval": INTERVAL,
                **asdict(times),
                "image_shape": list(times.image_shape),
            },
        )
        if not (memory.candidate.total and memory.reference.total):
            return (speed,)  # an exported file: its runtime allocates memory that torch does not count
        peak = Finding(
            self.name,
            f"peak memory of a forward pass of {self.batch}, candidate over {name}",
            memory.ratio,
            "x",
            n=1,
            details={"quantity": "memory", **asdict(memory)},
        )
        return speed, peak
