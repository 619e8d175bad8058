"""Checks of a forward pass's costs (parameters, MACs, speed, memory), and of a plan's promises on other images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.exporting import Baseline
from attnrx.nouns.evidence import HOLDS, UNDECIDED, Finding, against_limit
from attnrx.nouns.plan import PredictedQuantity, limits_of
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import mean_change, mean_estimate, mean_share
from attnrx.support.arguments import Kind, number, optional
from attnrx.support.errors import InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.support.modules import evaluating
from attnrx.support.progress import begin
from attnrx.support.shapes import Float, ImageBatch, Tensor
from attnrx.vit.costs import (
    Conditions,
    LatencyComparison,
    LatencyProtocol,
    ModelCosts,
    compare_latency,
    compare_memory,
    count_product_macs,
)
from attnrx.vit.costs.measured import PROCESSES
from attnrx.vit.models import counted_by_spec, family_of, timed_form

# The names of the runtimes for models that are not exported files.
KERNELS, PYTORCH = "attnrx's kernels", "PyTorch"
# If the test images are this many times the plan's images, the interval of the test images suffices. With a lognormal
# divergence of sigma 1.5, a promise of half the divergence then holds in 2 of 200 samples (`kept_promises` in
# benchmarks/coverage.py).
MANY_TIMES = 4
MIN_LOSS = 0.02  # the share of the images by which a loss may always exceed the promised loss


@dataclass(frozen=True)
class Costs(Check):
    """The savings in parameters and MACs, and claims that the closed forms equal the counts of both models.

    Parameters are counted with numel. MACs are counted with torch's FLOP counter on the unpadded eager backend.
    """

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
        # All parameters are counted, and not only the trainable ones, because the reference may be frozen.
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


def baseline_of(comparison: Comparison, library: bool) -> Baseline:
    """Returns the baseline of the speed, which is the reference. With `library` it runs its own library's code."""
    reference = comparison.reference
    if library and getattr(family_of(reference), "library", None) is not None:
        return Baseline.eager(reference)
    in_kernels = f"the reference in {KERNELS}" if comparison.runtime is not None else None
    return Baseline(in_kernels or "the unchanged model in the same kernels", reference)


def speed_findings(
    check: Check,
    comparison: Comparison,
    baseline: Baseline,
    images: ImageBatch,
    protocol: LatencyProtocol,
    limit: float | None = None,
    promise: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Times the candidate and the baseline, and returns findings of a check: the speed, and then its factors.

    There are factors if the unchanged model is also timed in the candidate's runtime. It is not timed if it is the
    baseline itself, or if there is no file of the unchanged model to compare a file with. `limit` is the least speed.
    `promise` has the details of a speed that a plan promised.
    """
    begin("measuring speed")
    model, baseline_name, runtime = baseline.model, baseline.title, comparison.runtime or KERNELS
    unchanged = comparison.unchanged
    if comparison.runtime is None and model is not comparison.reference:
        unchanged = comparison.reference
    in_kernels = protocol.conditions.in_kernels
    if not in_kernels and comparison.runtime is None:
        runtime, unchanged = PYTORCH, None  # the model runs its own code, so all of its speed is due to the compression
    times = compare_latency(timed_form(comparison.candidate, in_kernels), model, images, protocol, unchanged)
    return described_speed(check, times, baseline_name, runtime, limit, promise)


def described_speed(
    check: Check,
    times: LatencyComparison,
    baseline: str,
    runtime: str,
    limit: float | None = None,
    promise: Mapping[str, Any] | None = None,
    gained_by: str | None = None,
) -> tuple[Finding, ...]:
    """Returns a measured speed as a finding of a check, and then its factors if the unchanged model was timed.

    `runtime` names the candidate's runtime. `gained_by` names what makes the unchanged model faster there than the
    `baseline`, by default the runtime. `limit` and `promise` are the same as in `speed_findings`.
    """
    record = {"interval": times.interval, **asdict(times), "image_shape": list(times.image_shape), "baseline": baseline}
    if runtime not in (KERNELS, PYTORCH):
        record["runtime"] = runtime  # for a file (for a module, the version of torch is recorded)
    if gained_by is not None:
        record["gained_by"] = gained_by

    def found(quantity: str, claim: str, ratio: Estimate, details: Mapping[str, Any], least: float | None) -> Finding:
        return check.finding(quantity, claim, ratio, "x", n=times.rounds, limit=least, details=details)

    interval = {"interval": times.interval}
    quantity, claim = "speed", f"speed of a forward pass of {times.batch}, relative to {baseline}"
    if promise is not None:
        quantity, claim = "promised speed", f"{claim}, at least as predicted by the plan"
        record = {**promise, **interval, "measured": record}
    factors = (
        ("speed of unchanged", f"speed of the unchanged model in {runtime}, relative to {baseline}"),
        ("speed by compression", f"speed relative to the unchanged model in {runtime}"),
    )
    return found(quantity, claim, times.faster, record, limit), *(
        found(name, f"{words}, of a forward pass of {times.batch}", ratio, interval, None)
        for (name, words), ratio in zip(factors, (times.by_runtime, times.by_compression), strict=True)
        if ratio is not None
    )


@dataclass(frozen=True)
class Latency(Check):
    """The speed of a forward pass relative to the reference, timed in turns, and the ratio of peak memory.

    If the candidate and the baseline differ in more than the compression, the speed has two factors. `speed of
    unchanged` is due to the runtime, which is attnrx's kernels or the runtime of a file. `speed by compression` is
    relative to the unchanged model in the same runtime and precision.

    `batch` is the batch size. The device comes from the comparison, and the other conditions from the `protocol`. By
    default, the rounds are divided between PROCESSES processes. `faster` is the least speed, e.g. 1.5. On a busy
    machine the interval is wide, and the claim may be undecided. With `library`, the reference runs its own library's
    code.
    """

    measures_speed: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"faster": optional(number(0.0, expected="a speed above 0, e.g. 1.5"))}
    batch: int = 32
    protocol: LatencyProtocol = field(default_factory=lambda: LatencyProtocol(processes=PROCESSES))
    faster: float | None = None
    library: bool = False

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Times both models, then measures their memory."""
        # Latency depends only on the number of images, so images are repeated if there are too few.
        available = min(self.batch, len(comparison.data))
        first = next(iter(comparison.data.batches(available, device=comparison.device))).images
        images = first[torch.arange(self.batch, device=first.device) % len(first)]
        conditions = replace(self.protocol.conditions, device=str(comparison.device))
        # A user of the library sees the gain from attnrx's kernels, too.
        protocol, baseline = replace(self.protocol, conditions=conditions), baseline_of(comparison, self.library)
        found = speed_findings(self, comparison, baseline, images, protocol, self.faster)
        candidate = timed_form(comparison.candidate, conditions.in_kernels)
        memory = compare_memory(candidate, baseline.model, images, conditions)
        if not (memory.candidate.total and memory.reference.total):
            return found  # the runtime of an exported file allocates memory that torch does not count
        claim = f"peak memory of a forward pass of {self.batch}, candidate over {baseline.title}"
        peak = self.finding("memory", claim, memory.ratio, "x", n=1, details=asdict(memory))
        return *found, peak


@dataclass(frozen=True)
class Promises(Check):
    """Compares the predictions of the prescription's plan with measurements.

    There are claims about the divergence, the agreement, and the change of accuracy. A claim fails if the mean over
    these images is worse than the whole interval that the plan predicts for this number of images. If the mean is not
    worse, the interval of the mean decides. The claim holds if this interval also excludes twice the promised loss. If
    it does not, there are too few images. The claim is then undecided, with twice the promised loss as its limit.

    The loss is the divergence, or the share of images with changed decisions or lost accuracy. For shares, twice the
    loss is at least `MIN_LOSS` more than the loss. If the predicted interval ends at the end of the quantity's range,
    no model can miss it. The mean is then reported without a limit.

    The claim about speed in PyTorch is relative to the library's reference implementation. It holds if a pass takes at
    most the share `within` longer than predicted. Precision, threads, clock and batch size are the same as in the plan.
    `promised` replaces the record of the prescription (`Plan.predictions`).
    """

    measures_speed: ClassVar[bool] = True
    within: float = 0.1
    rounds: int = 32
    promised: Mapping[str, Any] | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        prescription = comparison.prescription
        record = self.promised or (None if prescription is None else prescription.about.get("plan"))
        if record is None:
            raise InvalidInput(
                "the check promises goes with a prescription that was planned; give that of attnrx.plan or shrink."
            )
        predictions, (base, other) = comparison.predictions, ("reference", "candidate")
        kind = predictions.kind
        per_image = {"divergence": predictions.divergence(base, other)}
        if kind.has_decisions:
            per_image["agreement"] = predictions.agreement(base, other)
        if kind.has_decisions and comparison.data.has_labels:
            per_image["change"] = predictions.change(base, other)
        findings = [
            _kept_promise(name, record["expected"][name], values, comparison)
            for name, values in per_image.items()
            if name in record["expected"]
        ]
        # Only plans for latency were timed. The speed of a file is measured elsewhere, together with other files.
        if record["measured"] is not None and "to" not in record["measured"]:
            findings += self._speed(comparison, record["measured"])
        return tuple(findings)

    def _speed(self, comparison: Comparison, promised: Mapping[str, Any]) -> tuple[Finding, ...]:
        graphs = promised.get("graphs", False) and torch.device(comparison.device).type == "cuda"
        sides = str(comparison.device), promised["precision"], promised["threads"]
        conditions = Conditions(*sides, graphs=graphs, plain=promised.get("plain", False))
        # Timing repeats the conditions of the plan: the same clock, and new processes if the plan used them.
        processes = min(PROCESSES, max(self.rounds // 2, 1)) if promised.get("in_subprocess", False) else 1
        # Long passes have only a few rounds, so one round is enough to warm up.
        warmup = 2 if self.rounds >= 4 * processes else 1
        protocol = LatencyProtocol(conditions, self.rounds, warmup, promised["clock"], processes)
        model, family = comparison.reference, family_of(comparison.reference)
        size = promised["batch"], *family.input_shape(model)
        # Latency does not depend on the values of the pixels.
        images = torch.randn(size, generator=torch.Generator().manual_seed(0))
        promise, limit = {"promised": dict(promised), "within": self.within}, promised["faster"] / (1 + self.within)
        baseline = baseline_of(comparison, library=True)
        return speed_findings(self, comparison, baseline, images, protocol, limit, promise)


# The quantity, its claim, its unit, its scale, and whether larger values are worse.
CLAIMS = {
    "divergence": ("{distance} from the original", "at most as predicted by the plan", "{unit}", 1.0, True),
    "agreement": ("agreement with the original", "at least as predicted by the plan", "%", 100.0, False),
    "change": ("change of {accuracy}", "at least as predicted by the plan", "points", 100.0, False),
}
ESTIMATES = {"divergence": mean_estimate, "agreement": mean_share, "change": mean_change}


def _kept_promise(
    quantity: str, record: Mapping[str, Any], values: Float[Tensor, "images"], comparison: Comparison
) -> Finding:
    (measure, as_predicted, unit, scale, _), kind, seed = CLAIMS[quantity], comparison.kind, comparison.seed
    words = {"distance": kind.distance, "accuracy": kind.accuracy, "unit": kind.unit}
    measure, unit = (text.format(**words) for text in (measure, unit))
    expected = PredictedQuantity(**record, limits=limits_of(quantity, kind))
    verdict = judged_promise(quantity, expected, values, seed)
    can_be_missed = verdict["limit"] is not None
    claim = f"{measure}, {as_predicted}" if can_be_missed else f"{measure}; the plan's prediction sets no limit"
    details = {
        "quantity": f"promised_{quantity}",
        "promised": scale * expected.value,
        "interval": [scale * end for end in expected.interval(len(values))],
    }
    scaled = {name: verdict[name] * scale for name in ("value", "low", "high")}
    limit = scale * verdict["limit"] if can_be_missed else None
    return Finding(Promises.name, claim, unit=unit, **{**verdict, **scaled, "limit": limit}, seed=seed, details=details)


def judged_promise(
    quantity: str, promised: PredictedQuantity, values: Float[Tensor, "images"], seed: int
) -> dict[str, Any]:
    """Returns arguments of `Finding`: the mean of a quantity over images, and the outcome of its promise."""
    more_is_worse, n, value = CLAIMS[quantity][-1], len(values), float(values.mean())
    # For a few images, all shares or changes may be equal, e.g. zero. These estimates still have intervals of nonzero
    # width.
    interval, measured = promised.interval(n), ESTIMATES[quantity](values, seed)
    worst = interval[1] if more_is_worse else interval[0]
    # If every model meets a claim, the claim says nothing about this model.
    limit = worst if worst not in promised.limits else None
    # The limit is the end of a prediction interval, which already covers the noise of n images. So a mean beyond the
    # limit fails, whatever its own interval is.
    verdict = against_limit(value, limit, n=n, at_least=not more_is_worse)
    if verdict.get("outcome") == HOLDS:
        # With only a few images, the limit is far from the promise, and a model that is twice as bad would often meet
        # it. So the interval of these images must exclude twice the loss. Unless they are many times more than the
        # plan's images, an interval from the spread of the plan's images must exclude it, too. A few images of either
        # set may lack the tail.
        double, spread = doubled_loss(quantity, promised)
        ends = measured.low, measured.high
        if n < MANY_TIMES * promised.images:
            ends = min(measured.low, value - spread / n**0.5), max(measured.high, value + spread / n**0.5)
        excluded = against_limit(value, double, ends, n, at_least=not more_is_worse)
        if excluded["outcome"] != HOLDS:
            # The finding has the limit that these images do not exclude.
            verdict |= {"outcome": UNDECIDED, "limit": double, "deciding_n": excluded.get("deciding_n")}
    return {**verdict, "value": value, "low": measured.low, "high": measured.high}


def doubled_loss(quantity: str, promised: PredictedQuantity) -> tuple[float, float]:
    """Returns a quantity's value at twice the promised loss, and 1.96 standard deviations over images at that loss.

    For shares of images, this loss is at least `MIN_LOSS` above the promised loss.
    """
    if quantity == "divergence":
        return 2 * promised.value, 2 * 1.96 * promised.spread  # every image diverges twice as much
    lost = 1 - promised.value if quantity == "agreement" else -promised.value
    # The number of images with the loss doubles, and so does the variance.
    return promised.value - max(lost, MIN_LOSS), 2**0.5 * 1.96 * promised.spread
