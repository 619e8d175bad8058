"""Promises: the latency and accuracy predicted by a plan, compared with new measurements on other images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.checks.statistics import mean_estimate
from attnrx.costs import Conditions, LatencyProtocol, compare_latency
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.model_outputs import Embeddings, OutputKind
from attnrx.models import family_of
from attnrx.runtime.subprocess_runner import call_in_subprocess_if
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class PredictedQuantity:
    """The prediction of one quantity: mean and standard deviation over images, and the number of images.

    These images are not among those the plan was made on. `limits` is the range of the quantity (`limits_of`).
    """

    value: float
    spread: float
    images: int
    limits: tuple[float, float] = (-inf, inf)

    def interval(self, images: int) -> tuple[float, float]:
        """Returns the 95 % prediction interval of the mean over this many other images, within the limits."""
        # The variance of a difference of two means, of the images of the plan and of these; 1.96 for 95 %.
        half = 1.96 * self.spread * (1 / self.images + 1 / images) ** 0.5
        # The normal distribution continues beyond the range of the quantity, e.g. beyond an agreement of 100 %.
        least, most = self.limits
        return max(self.value - half, least), min(self.value + half, most)

    def to_record(self) -> dict[str, float]:
        """Returns the prediction as JSON-ready values; the limits follow from the name of the quantity."""
        return {"value": self.value, "spread": self.spread, "images": self.images}


def limits_of(quantity: str, outputs: OutputKind) -> tuple[float, float]:
    """Returns the smallest and largest possible value: of agreement and change as shares, of the divergence."""
    if quantity == "divergence":
        return 0.0, 2.0 if isinstance(outputs, Embeddings) else inf  # the cosine distance is at most 2
    return (0.0, 1.0) if quantity == "agreement" else (-1.0, 1.0)


@dataclass(frozen=True)
class Promises(Check):
    """Compares the predictions of the plan behind the prescription with measurements.

    The claims about divergence, agreement and change of accuracy hold if the mean over these images is no worse than
    the end of the plan's prediction interval for this number of images; where that is the end of the quantity's range,
    which no model can miss, the mean is reported without a limit. The claim about speed, relative to the library's
    reference implementation, holds if a pass takes at most the share `within` longer than predicted. Precision,
    threads, clock and batch size are those of the plan. `promised` replaces the record of the prescription
    (`Plan.promises`).
    """

    name: ClassVar[str] = "promises"
    on_request: ClassVar[bool] = True
    within: float = 0.1
    rounds: int = 20
    promised: Mapping[str, Any] | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        prescription = comparison.prescription
        record = self.promised or (None if prescription is None else prescription.about.get("plan"))
        if record is None:
            raise InvalidInput(
                "the check promises goes with a prescription that was planned; give that of `attnrx plan`."
            )
        predictions, (base, other) = comparison.predictions, ("reference", "candidate")
        per_image = {
            "divergence": predictions.kind.divergence(predictions.outputs[base], predictions.outputs[other]),
            "agreement": (predictions.decisions(base) == predictions.decisions(other)).double(),
        }
        if comparison.data.has_labels:
            per_image["change"] = predictions.correct(other).double() - predictions.correct(base).double()
        findings = [
            _kept_promise(name, record["expected"][name], values, comparison)
            for name, values in per_image.items()
            if name in record["expected"]
        ]
        # Only a plan for latency was timed.
        if record["measured"] is not None:
            findings.append(self._speed(comparison, record["measured"]))
        return tuple(findings)

    def _speed(self, comparison: Comparison, promised: Mapping[str, Any]) -> Finding:
        conditions = Conditions(str(comparison.device), promised["precision"], promised["threads"])
        protocol = LatencyProtocol(conditions, self.rounds, warmup=2, clock=promised["clock"], kernels=False)
        # As the plan was timed: by the same clock, and in a process of its own if it was.
        model, family = comparison.reference, family_of(comparison.reference)
        size = promised["batch"], *family.input_shape(model)
        # Latency does not depend on the values of the pixels.
        images = torch.randn(size, generator=torch.Generator().manual_seed(0))
        sides = comparison.candidate, family.library_model(model), images, protocol
        measured = call_in_subprocess_if(compare_latency, *sides, in_subprocess=promised.get("in_subprocess", False))
        faster, limit = measured.faster, promised["faster"] / (1 + self.within)
        return Finding(
            self.name,
            f"speed of a forward pass of {measured.batch}, relative to the original, at least as predicted by the plan",
            faster.value,
            "x",
            **judged(faster.value, limit, (faster.low, faster.high), measured.rounds, at_least=True),
            seed=protocol.seed,
            details={
                "quantity": "promised speed",
                "promised": dict(promised),
                "within": self.within,
                "measured": {**asdict(measured), "image_shape": list(measured.image_shape)},
            },
        )


# The quantity, its claim, its unit, its scale, and whether larger values are worse.
CLAIMS = {
    "divergence": ("{distance} from the original", "at most as predicted by the plan", "{unit}", 1.0, True),
    "agreement": ("agreement with the original", "at least as predicted by the plan", "%", 100.0, False),
    "change": ("change of {accuracy}", "at least as predicted by the plan", "points", 100.0, False),
}


def _kept_promise(
    quantity: str, record: Mapping[str, Any], found: Float[Tensor, "images"], comparison: Comparison
) -> Finding:
    (measure, as_predicted, unit, scale, more_is_worse), kind, seed = CLAIMS[quantity], comparison.kind, comparison.seed
    words = {"distance": kind.distance, "accuracy": kind.accuracy, "unit": kind.unit}
    measure, unit = (text.format(**words) for text in (measure, unit))
    expected = PredictedQuantity(**record, limits=limits_of(quantity, kind))
    n, value = len(found), scale * float(found.mean())
    interval = expected.interval(n)
    worst = interval[1] if more_is_worse else interval[0]
    # A claim that every model meets would hold without saying anything about this one.
    can_be_missed = worst not in expected.limits
    # The limit is the end of a prediction interval, which already covers the noise of n images: the measured interval
    # is reported, but not used for the outcome.
    limit, measured = scale * worst if can_be_missed else None, mean_estimate(found, seed).scaled(scale)
    fields = {**judged(value, limit, n=n, at_least=not more_is_worse), "low": measured.low, "high": measured.high}
    claim = f"{measure}, {as_predicted}" if can_be_missed else f"{measure}; the plan's prediction sets no limit"
    details = {
        "quantity": f"promised_{quantity}",
        "promised": scale * expected.value,
        "interval": [scale * end for end in interval],
    }
    return Finding(Promises.name, claim, value, unit, **fields, seed=seed, details=details)
