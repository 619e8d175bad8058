"""Checks of what a forward pass costs (parameters, MACs, speed, memory), and of what a plan predicted."""

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
# If there are this many times more test images than planning images, the test images' interval is enough to judge a
# promise. A plan that promises half the true divergence then passes in 2 of 200 samples, with lognormal divergences of
# sigma 1.5 (`kept_promises` in benchmarks/coverage.py).
MANY_TIMES = 4
MIN_LOSS = 0.02  # twice a promised loss is at least this share of the images above the promise


@dataclass(frozen=True)
class Costs(Check):
    """The parameters and MACs that the candidate saves, and a test of the closed-form costs of both models.

    The claim is that the costs computed in closed form equal the counted costs. Parameters are counted with numel. MACs
    are counted with torch's FLOP counter, while the attention runs eagerly and without padding.
    """

    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Computes the costs of both models in closed form, then counts the same costs on one image."""
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
        # Closed forms and counts are exact integers, so no difference is allowed.
        off = float(abs(params - closed.params) + abs(macs - closed.product_macs))
        claim = f"parameters and MACs of the {role} equal its closed form"
        return self.finding("counted costs", claim, off, "difference", n=1, limit=0.0, side="<=", details=details)


def baseline_of(comparison: Comparison, library: bool) -> Baseline:
    """Returns the reference as the baseline of a timing. With `library`, the baseline runs in its library's code."""
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
    """Times the candidate and the baseline, and returns the speed and its factors as findings of `check`.

    The speed is the product of two factors: the gain from the runtime and the gain from the compression. The factors
    are omitted if the baseline is already the unchanged model in the candidate's runtime. They are also omitted if the
    candidate is a file and no file of the unchanged model exists. `limit` is the smallest allowed speed. `promise` is
    the record of a speed that a plan predicted.
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
    change: str | None = None,
    unchanged_in: str | None = None,
) -> tuple[Finding, ...]:
    """Returns a measured speed and, if the unchanged model was timed, its two factors as findings of `check`.

    `runtime` names the candidate's runtime. `gained_by` names what makes the unchanged model faster in this runtime
    than the `baseline`, by default the runtime itself. `change` names what makes the candidate faster than the
    unchanged model, by default the compression. `unchanged_in` names the unchanged model's runtime, by default the
    candidate's. `limit` and `promise` are the same as in `speed_findings`.
    """
    record = {"interval": times.interval, **asdict(times), "image_shape": list(times.image_shape), "baseline": baseline}
    if runtime not in (KERNELS, PYTORCH):
        record["runtime"] = runtime  # only for files, because the record of a module has torch's version
    record |= {name: words for name, words in {"gained_by": gained_by, "change": change}.items() if words is not None}

    def found(quantity: str, claim: str, ratio: Estimate, details: Mapping[str, Any], least: float | None) -> Finding:
        return check.finding(quantity, claim, ratio, "x", n=times.rounds, limit=least, details=details)

    interval = {"interval": times.interval}
    quantity, claim = "speed", f"speed of a forward pass of {times.batch}, relative to {baseline}"
    if promise is not None:
        quantity, claim = "promised speed", f"{claim}, at least as predicted by the plan"
        record = {**promise, **interval, "measured": record}
    unchanged = f"the unchanged model in {unchanged_in or runtime}"
    factors = (
        ("speed of unchanged", f"speed of {unchanged}, relative to {baseline}"),
        ("speed by compression", f"speed relative to {unchanged}"),
    )
    return found(quantity, claim, times.faster, record, limit), *(
        found(name, f"{words}, of a forward pass of {times.batch}", ratio, interval, None)
        for (name, words), ratio in zip(factors, (times.by_runtime, times.by_compression), strict=True)
        if ratio is not None
    )


@dataclass(frozen=True)
class Latency(Check):
    """The speed and the peak memory of a forward pass, relative to the reference. Both models are timed alternately.

    If the candidate and the baseline differ in more than the compression, the speed is split into two factors. The
    `speed of unchanged` is the gain from the runtime, i.e. from attnrx's kernels or the runtime of a file. The
    `speed by compression` is relative to the unchanged model in the same runtime and precision.

    `batch` is the batch size. The device comes from the comparison, and the other conditions come from the `protocol`.
    By default, the timing rounds are divided among PROCESSES processes. `faster` is the smallest allowed speed, e.g.
    1.5. On a busy machine the interval is wide, and the claim may be undecided. With `library`, the reference runs in
    its own library's code instead of attnrx's kernels.
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
        # With `library`, the speed includes the gain from attnrx's kernels, as a user of that library sees it.
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
    """Compares what a prescription's plan predicted (promised) with measurements on these images.

    A plan predicts the divergence, the agreement and the change of accuracy, each with an interval. Every prediction
    becomes a claim. The claim fails if the mean over these images is beyond the worse end of the interval that was
    predicted for this number of images. Otherwise, the claim holds if the mean's own interval excludes twice the
    promised loss. If the interval includes twice the promised loss, there are too few images. The claim is then
    undecided, and its limit is twice the promised loss.

    The promised loss is the predicted divergence, the predicted share of images with changed decisions, or the
    predicted loss of accuracy. For shares of images, twice the loss counts as at least `MIN_LOSS` more than the
    promised loss. If the worse end of the predicted interval is the worst possible value, every model meets the
    prediction, and the mean is reported without a limit.

    If the plan was timed in PyTorch, it also predicts a speed relative to the library's own implementation. This claim
    holds if a pass takes at most 10 % longer than predicted (`within`). Precision, threads, clock and batch size are
    the same as in the plan. If you pass `promised`, it is used instead of the predictions in the prescription's record
    (`Plan.predictions`).
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
        # Only plans for latency contain a measured speed. The speed of a file is measured elsewhere, with other files.
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


# What is measured, the claim about it, its unit, its scale, and whether larger values are worse.
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
    """Returns the keyword arguments for a `Finding` that says whether the mean of a quantity keeps the promise."""
    more_is_worse, n, value = CLAIMS[quantity][-1], len(values), float(values.mean())
    # Over a few images, all shares or changes may be equal, e.g. zero. The functions in ESTIMATES return intervals of
    # nonzero width even then.
    interval, measured = promised.interval(n), ESTIMATES[quantity](values, seed)
    worst = interval[1] if more_is_worse else interval[0]
    # There is no limit at the end of the quantity's range, because every model would meet it.
    limit = worst if worst not in promised.limits else None
    # The limit is the end of a prediction interval, which already covers the noise of n images. So a mean beyond the
    # limit fails, whatever its own interval is.
    verdict = against_limit(value, limit, n=n, at_least=not more_is_worse)
    if verdict.get("outcome") == HOLDS:
        # With only a few images, the limit is far from the promise, and a model with twice the loss would often meet
        # it. So the interval of these images must exclude twice the loss. A few images may lack the tail of the
        # distribution, and their interval is then too narrow. Unless there are MANY_TIMES more test images than
        # planning images, an interval from the planning images' spread must also exclude twice the loss.
        double, spread = doubled_loss(quantity, promised)
        ends = measured.low, measured.high
        if n < MANY_TIMES * promised.images:
            ends = min(measured.low, value - spread / n**0.5), max(measured.high, value + spread / n**0.5)
        excluded = against_limit(value, double, ends, n, at_least=not more_is_worse)
        if excluded["outcome"] != HOLDS:
            # The finding's limit becomes twice the loss, which these images do not exclude.
            verdict |= {"outcome": UNDECIDED, "limit": double, "deciding_n": excluded.get("deciding_n")}
    return {**verdict, "value": value, "low": measured.low, "high": measured.high}


def doubled_loss(quantity: str, promised: PredictedQuantity) -> tuple[float, float]:
    """Returns a quantity's value at twice the promised loss, and 1.96 times its standard deviation at this loss.

    For shares of images, twice the loss counts as at least `MIN_LOSS` more than the promised loss. The standard
    deviation is over images.
    """
    if quantity == "divergence":
        return 2 * promised.value, 2 * 1.96 * promised.spread  # every image diverges twice as much
    lost = 1 - promised.value if quantity == "agreement" else -promised.value
    # Twice as many images have the loss, so the variance doubles, too.
    return promised.value - max(lost, MIN_LOSS), 2**0.5 * 1.96 * promised.spread
