"""Calibration: the expected calibration error of both models and its change."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison, Predictions
from attnrx.checks.statistics import Estimate, calibration_error, calibration_gaps, estimate, resampled_means
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding, judged
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Calibration(Check):
    """The expected calibration error (ECE) of both models and its paired change, in points.

    Confidence is the largest softmax probability, in `bins` bins of equal width (Guo et al., 2017). The ECE estimate is
    non-negative and therefore biased upwards on few images; most of the bias cancels in the change. `most_rise` limits
    the change, in points; with None the change is only reported.
    """

    name: ClassVar[str] = "calibration"
    needs_labels: ClassVar[bool] = True
    bins: int = 15
    most_rise: float | None = None

    def __post_init__(self):
        if self.bins < 1 or (self.most_rise is not None and self.most_rise < 0):
            raise InvalidInput(
                f"Calibration(bins={self.bins}, most_rise={self.most_rise}): take at least one bin, and a limit of "
                "0 or more, or None."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Bins the predictions of both models by confidence."""
        predictions, seed = comparison.predictions, comparison.seed
        gaps = [self._gaps(role, predictions) for role in ("reference", "candidate")]
        values = [100 * calibration_error(gap.mean(0)) for gap in gaps]
        # Both models share the resamples, so that the change is paired.
        draws = 100 * calibration_error(resampled_means(torch.cat(gaps, dim=1), seed).unflatten(1, (2, self.bins)))
        change = estimate(float(values[1] - values[0]), draws[:, 1] - draws[:, 0])
        own = [
            self._finding(f"expected calibration error of the {role}", estimate(float(value), draw), comparison)
            for role, value, draw in zip(("reference", "candidate"), values, draws.T, strict=True)
        ]
        return (*own, self._finding("change of calibration error, candidate minus reference", change, comparison))

    def _gaps(self, role: str, predictions: Predictions) -> Float[Tensor, "images bins"]:
        confidence = predictions.logits[role].double().softmax(-1).amax(-1)
        return calibration_gaps(confidence, predictions.correct(role), self.bins)

    def _finding(self, claim: str, found: Estimate, comparison: Comparison) -> Finding:
        limit = self.most_rise if claim.startswith("change") else None
        return Finding(
            self.name,
            claim,
            found.value,
            "points",
            **judged(found.value, limit, (found.low, found.high), len(comparison.predictions), at_least=False),
            seed=comparison.seed,
            details={"quantity": claim.partition(",")[0], "bins": self.bins},
        )
