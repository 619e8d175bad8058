"""Promises: the latency and accuracy predicted by a plan, compared with new measurements on other images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attnrx.nouns.evidence import HOLDS, UNDECIDED, Finding, judged
from attnrx.nouns.plan import PredictedQuantity, limits_of
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.costs import baseline_of, speed_findings
from attnrx.show.checks.statistics import mean_change, mean_estimate, mean_share
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx.vit.costs.measured import PROCESSES
from attnrx.vit.models import family_of

# With so many times the images of the plan their own interval suffices: with a lognormal divergence of sigma 1.5, twice
# the promise holds in 2 of 200 samples (`kept_promises` of benchmarks/coverage.py).
MANY_TIMES = 4
MIN_LOSS = 0.02  # of the images: a loss that differs by less from the promised one is the promised one


@dataclass(frozen=True)
class Promises(Check):
    """Compares the predictions of the plan behind the prescription with measurements.

    The claims about divergence, agreement and change of accuracy fail if the mean over these images is worse than the
    end of the plan's prediction interval for this number of images. They hold if it is not, and if the interval of the
    mean excludes twice what was promised: twice the divergence, twice the share of changed decisions or of lost images,
    but at least `MIN_LOSS` more of these. Otherwise the images are too few, and the claim is undecided; its limit is
    then twice what was promised. Where the end of the prediction interval is that of the quantity's range, which no
    model can miss, the mean is reported without a limit. The claim about speed, relative to the library's reference
    implementation, holds if a pass takes at most the share `within` longer than predicted. Precision, threads, clock
    and batch size are those of the plan. `promised` replaces the record of the prescription (`Plan.predictions`).
    """

    name: ClassVar[str] = "promises"
    on_request: ClassVar[bool] = True
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
        # Only a plan for latency was timed.
        if record["measured"] is not None:
            findings += self._speed(comparison, record["measured"])
        return tuple(findings)

    def _speed(self, comparison: Comparison, promised: Mapping[str, Any]) -> tuple[Finding, ...]:
        graphs = promised.get("graphs", False) and torch.device(comparison.device).type == "cuda"
        conditions = Conditions(str(comparison.device), promised["precision"], promised["threads"], graphs=graphs)
        # As the plan was timed: by the same clock, and in processes of its own if it was.
        processes = min(PROCESSES, max(self.rounds // 2, 1)) if promised.get("in_subprocess", False) else 1
        # As long passes have few rounds, one is enough to warm up.
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
    """Returns the mean of a quantity over images, as arguments of `Finding`, with the outcome of its promise."""
    more_is_worse, n, value = CLAIMS[quantity][-1], len(values), float(values.mean())
    # Of shares and changes of few images all may be equal, e.g. zero: their intervals have nonzero width.
    interval, measured = promised.interval(n), ESTIMATES[quantity](values, seed)
    worst = interval[1] if more_is_worse else interval[0]
    # A claim that every model meets would hold without saying anything about this one.
    limit = worst if worst not in promised.limits else None
    # The limit is the end of a prediction interval, which already covers the noise of n images: a mean beyond it fails,
    # whatever its own interval is.
    verdict = judged(value, limit, n=n, at_least=not more_is_worse)
    if verdict.get("outcome") == HOLDS:
        # On few images the limit is far from the promise: a model that is twice as bad would often meet it. Excluded
        # by the interval of these images and, unless they are many times more, by the spread of the plan's: few images
        # of either lack the tail.
        double, spread = doubled_loss(quantity, promised)
        ends = measured.low, measured.high
        if n < MANY_TIMES * promised.images:
            ends = min(measured.low, value - spread / n**0.5), max(measured.high, value + spread / n**0.5)
        excluded = judged(value, double, ends, n, at_least=not more_is_worse)
        if excluded["outcome"] != HOLDS:
            # Stated with the limit that these images do not exclude.
            verdict |= {"outcome": UNDECIDED, "limit": double, "deciding_n": excluded.get("deciding_n")}
    return {**verdict, "value": value, "low": measured.low, "high": measured.high}


def doubled_loss(quantity: str, promised: PredictedQuantity) -> tuple[float, float]:
    """Returns the value of a quantity at twice the promised loss, and 1.96 standard deviations over images there.

    For shares of images the loss is at least `MIN_LOSS` more.
    """
    if quantity == "divergence":
        return 2 * promised.value, 2 * 1.96 * promised.spread  # every image diverges twice as much
    lost = 1 - promised.value if quantity == "agreement" else -promised.value
    # Twice as many images have the loss, so that its variance doubles.
    return promised.value - max(lost, MIN_LOSS), 2**0.5 * 1.96 * promised.spread
