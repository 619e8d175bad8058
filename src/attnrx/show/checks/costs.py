"""The price of a pass: parameters and MACs, speed and memory of the candidate relative to the reference."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.nouns.evidence import Estimate, Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import begin
from attnrx.support.shapes import ImageBatch, Tensor
from attnrx.vit.costs import LatencyProtocol, ModelCosts, compare_latency, compare_memory, count_product_macs
from attnrx.vit.costs.measured import PROCESSES, Ratio
from attnrx.vit.models import counted_by_spec, evaluating, family_of

KERNELS = "attnrx's kernels"  # the runtime of models that are no exported files


@dataclass(frozen=True)
class Costs(Check):
    """The savings in parameters and MACs, and claims that the closed forms equal the counts on both models.

    Parameters are counted with numel, MACs with torch's FLOP counter on the unpadded eager backend.
    """

    name: ClassVar[str] = "costs"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Computes the closed-form costs of both models, then counts them on one image."""
        reference = family_of(comparison.reference).costs(comparison.reference)
        candidate = family_of(comparison.candidate).costs(comparison.candidate)
        # The counted MACs are per image, so one image is enough.
        batch = next(iter(comparison.data.take(1).batches(1, device=comparison.device)))
        return (
            self._saved("parameters", reference.params, candidate.params),
            self._saved("MACs", reference.macs, candidate.macs),
            self._counted("reference", comparison.reference, reference, batch.images),
            self._counted("candidate", comparison.candidate, candidate, batch.images),
        )

    def _saved(self, what: str, before: int, after: int) -> Finding:
        amounts = {"reference": before, "candidate": after}
        return self.finding(what, f"{what} saved by the candidate", 100 * (1 - after / before), "%", details=amounts)

    def _counted(self, role: str, model: nn.Module, closed: ModelCosts, images: Tensor) -> Finding:
        # All parameters, not only the trainable ones: the reference may be frozen.
        params = sum(parameter.numel() for parameter in model.parameters())
        with evaluating([model]), counted_by_spec(model, family_of(model)):
            macs = count_product_macs(model, images.to(next(model.parameters()).dtype))
        details = {
            "model": role,
            "params": {"closed_form": closed.params, "counted": params},
            "macs_of_products": {"closed_form": closed.product_macs, "counted": macs},
            "parts": closed.to_record()["parts"],
        }
        # Both are exact integers, so the limit is 0.
        off = float(abs(params - closed.params) + abs(macs - closed.product_macs))
        claim = f"parameters and MACs of the {role} equal its closed form"
        return self.finding("counted costs", claim, off, "difference", n=1, limit=0.0, side="<=", details=details)


def baseline_of(comparison: Comparison, library: bool) -> tuple[nn.Module, str]:
    """Returns what the speed is relative to, and its name in claims: the reference, with `library` that of its library.

    A model of attnrx has no other implementation.
    """
    reference = comparison.reference
    name = getattr(family_of(reference), "library", None) if library else None
    if name is not None:
        where = "its own code" if name == "module" else name
        return family_of(reference).library_model(reference), f"the original in {where}"
    if comparison.runtime is not None:
        return reference, f"the reference in {KERNELS}"
    return reference, "the unchanged model in the same kernels"


def speed_findings(
    check: Check,
    comparison: Comparison,
    baseline: tuple[nn.Module, str],
    images: ImageBatch,
    protocol: LatencyProtocol,
    limit: float | None = None,
    promise: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Times the candidate beside the baseline, and returns its speed as a finding of a check, then the factors of it.

    There are factors where the unchanged model is timed too, in the runtime of the candidate: if this is neither the
    baseline itself nor a file without a file of the unchanged model beside it. `limit` is the least speed; `promise`
    are the details of a speed that a plan promised.
    """
    begin("measuring speed")
    (model, baseline_name), runtime = baseline, comparison.runtime or KERNELS
    unchanged = comparison.unchanged
    if comparison.runtime is None and model is not comparison.reference:
        unchanged = comparison.reference
    times = compare_latency(comparison.candidate, model, images, protocol, unchanged)
    record = {
        "interval": times.interval,
        **asdict(times),
        "image_shape": list(times.image_shape),
        "baseline": baseline_name,
    }
    if runtime != KERNELS:
        record["runtime"] = runtime  # of a file; else the version of torch is recorded

    def found(quantity: str, claim: str, ratio: Ratio, details: Mapping[str, Any], least: float | None) -> Finding:
        estimate = Estimate(ratio.value, ratio.low, ratio.high)
        return check.finding(quantity, claim, estimate, "x", n=times.rounds, limit=least, details=details)

    interval = {"interval": times.interval}
    quantity, claim = "speed", f"speed of a forward pass of {times.batch}, relative to {baseline_name}"
    if promise is not None:
        quantity, claim = "promised speed", f"{claim}, at least as predicted by the plan"
        record = {**promise, **interval, "measured": record}
    factors = (
        ("speed of unchanged", f"speed of the unchanged model in {runtime}, relative to {baseline_name}"),
        ("speed by compression", f"speed relative to the unchanged model in {runtime}"),
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
        protocol, baseline = replace(self.protocol, conditions=conditions), baseline_of(comparison, self.library)
        found = speed_findings(self, comparison, baseline, images, protocol, self.faster)
        memory = compare_memory(comparison.candidate, baseline[0], images, conditions)
        if not (memory.candidate.total and memory.reference.total):
            return found  # an exported file: its runtime allocates memory that torch does not count
        claim = f"peak memory of a forward pass of {self.batch}, candidate over {baseline[1]}"
        peak = self.finding("memory", claim, memory.ratio, "x", n=1, details=asdict(memory))
        return *found, peak
