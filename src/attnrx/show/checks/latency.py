"""Speed and memory of the candidate relative to the reference, measured interleaved on this machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.nouns.evidence import Estimate, Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import begin
from attnrx.support.shapes import ImageBatch
from attnrx.vit.costs import LatencyProtocol, compare_latency, compare_memory
from attnrx.vit.costs.latency import PROCESSES, Ratio
from attnrx.vit.models import family_of

KERNELS = "attnrx's kernels"  # the runtime of models that are no exported files


def library_name(model: nn.Module) -> str | None:
    """Returns the library of a model, e.g. "timm"; None for a model of attnrx, which has no other implementation."""
    library = getattr(family_of(model), "library", None)
    return "its own code" if library == "module" else library


@dataclass(frozen=True, eq=False)
class TimedModels:
    """What a candidate is timed beside: the `baseline` of its speed, and the `unchanged` model in its runtime.

    `baseline_name` and `runtime` are their names in claims. Without `unchanged` the baseline is the unchanged model
    itself, or an exported file has no file of the unchanged model beside it.
    """

    baseline: nn.Module
    baseline_name: str
    unchanged: nn.Module | None
    runtime: str

    @classmethod
    def of(cls, comparison: Comparison, library: bool) -> "TimedModels":
        """Returns the models for a comparison; with `library` the baseline is the model in its own library."""
        reference, runtime = comparison.reference, comparison.runtime
        # A candidate that is no file runs in attnrx's kernels, as the reference does.
        unchanged = comparison.unchanged if runtime is not None else reference
        if library and (name := library_name(reference)) is not None:
            baseline = family_of(reference).library_model(reference)
            return cls(baseline, f"the original in {name}", unchanged, runtime or KERNELS)
        if runtime is not None:
            return cls(reference, f"the reference in {KERNELS}", unchanged, runtime)
        return cls(reference, "the unchanged model in the same kernels", None, KERNELS)

    def findings(
        self,
        check: Check,
        comparison: Comparison,
        images: ImageBatch,
        protocol: LatencyProtocol,
        limit: float | None = None,
        promise: Mapping[str, Any] | None = None,
    ) -> tuple[Finding, ...]:
        """Times the models, and returns the speed of the candidate as a finding of a check, then its factors.

        `limit` is the least speed; `promise` are the details of a speed that a plan promised.
        """
        begin("measuring speed")
        times = compare_latency(comparison.candidate, self.baseline, images, protocol, self.unchanged)
        record = {
            "interval": times.interval,
            **asdict(times),
            "image_shape": list(times.image_shape),
            "baseline": self.baseline_name,
        }
        if self.runtime != KERNELS:
            record["runtime"] = self.runtime  # of a file; else the version of torch is recorded

        def found(quantity: str, claim: str, ratio: Ratio, details: Mapping[str, Any], least: float | None) -> Finding:
            estimate = Estimate(ratio.value, ratio.low, ratio.high)
            return check.finding(quantity, claim, estimate, "x", n=times.rounds, limit=least, details=details)

        interval = {"interval": times.interval}
        quantity, claim = "speed", f"speed of a forward pass of {times.batch}, relative to {self.baseline_name}"
        if promise is not None:
            quantity, claim = "promised speed", f"{claim}, at least as predicted by the plan"
            record = {**promise, **interval, "measured": record}
        factors = (
            ("speed of unchanged", f"speed of the unchanged model in {self.runtime}, relative to {self.baseline_name}"),
            ("speed by compression", f"speed relative to the unchanged model in {self.runtime}"),
        )
        return found(quantity, claim, times.faster, record, limit), *(
            found(name, f"{words}, of a forward pass of {times.batch}", ratio, interval, None)
            for (name, words), ratio in zip(factors, (times.by_runtime, times.by_compression), strict=True)
            if ratio is not None
        )


@dataclass(frozen=True)
class Latency(Check):
    """The speed of a forward pass relative to the reference, measured interleaved, and the ratio of peak memory.

    The speed has two factors where the candidate and the baseline differ in more than the compression: what the
    runtime gave (`speed of unchanged`: attnrx's kernels, or the runtime of a file) and what the compression gave
    (`speed by compression`: relative to the unchanged model in the same runtime and precision).

    `batch` is the batch size. The device is that of the comparison, the other conditions are those of the protocol, by
    default with the rounds divided between PROCESSES processes.
    `faster` is the least speed, e.g. 1.5; on a busy machine the interval is wide and the claim undecided. With
    `library` the reference is the model as implemented by its own library.
    """

    name: ClassVar[str] = "latency"
    measures_speed: ClassVar[bool] = True
    batch: int = 32
    protocol: LatencyProtocol = field(default_factory=lambda: LatencyProtocol(processes=PROCESSES))
    faster: float | None = None
    library: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.batch < 1 or (self.faster is not None and not self.faster > 0):
            raise InvalidInput(
                f"Latency(batch={self.batch}, faster={self.faster}): give an image and a speed above 0, e.g. 1.5."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Times both models, then measures their memory."""
        # Latency depends on the number of images only: they are repeated if there are fewer.
        available = min(self.batch, len(comparison.data))
        first = next(iter(comparison.data.batches(available, device=comparison.device))).images
        images = first[torch.arange(self.batch, device=first.device) % len(first)]
        conditions = replace(self.protocol.conditions, device=str(comparison.device))
        # The gain by attnrx's kernels is part of the speed that a user of the library sees.
        timed = TimedModels.of(comparison, self.library)
        found = timed.findings(self, comparison, images, replace(self.protocol, conditions=conditions), self.faster)
        memory = compare_memory(comparison.candidate, timed.baseline, images, conditions)
        if not (memory.candidate.total and memory.reference.total):
            return found  # an exported file: its runtime allocates memory that torch does not count
        claim = f"peak memory of a forward pass of {self.batch}, candidate over {timed.baseline_name}"
        peak = self.finding("memory", claim, memory.ratio, "x", n=1, details=asdict(memory))
        return *found, peak
