"""Calibration: the expected calibration error of both models and its change."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.nouns.evidence import Estimate, Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import (
    biased_change,
    calibration_error,
    calibration_gaps,
    calibration_interval,
    resampled_means,
)


@dataclass(frozen=True)
class Calibration(Check):
    """The expected calibration error (ECE) of both models and its paired change, in points.

    Confidence is the largest softmax probability, in `bins` bins of equal width (Guo et al., 2017). The ECE estimate is
    non-negative and therefore biased upwards on few images; most of the bias cancels in the change of similar models.
    The intervals take the bias into account (`statistics.calibration_interval`, `statistics.biased_change`).
    `most_rise` limits the change, in points; with None the change is only reported.
    """

    name: ClassVar[str] = "calibration"
    needs: ClassVar[tuple[str, ...]] = ("labels", "logits")
    bins: int = 15
    most_rise: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        kind = comparison.require_logits(self.name)
        predictions, seed = comparison.predictions, comparison.seed
        n, roles = len(predictions), ("reference", "candidate")
        gaps = []  # by model [images, bins]
        for role in roles:
            # Of every image, from which the error of any resample is a mean of columns and a sum.
            confidence = kind.class_logits(predictions.outputs[role].double()).softmax(-1).amax(-1)
            gaps.append(calibration_gaps(confidence, predictions.correct(role), self.bins))
        # Both models share the resamples, so that the change is paired. [models, bins] and [models, draws, bins]
        means = torch.stack([gap.mean(0) for gap in gaps])
        draws = resampled_means(torch.cat(gaps, dim=1), seed).unflatten(1, (2, self.bins)).transpose(0, 1)
        findings = [
            self._error(f"expected calibration error of the {role}", calibration_interval(*each), n, seed)
            for role, *each in zip(roles, means, draws, strict=True)
        ]
        values, samples = calibration_error(means), calibration_error(draws)
        change = biased_change(float(values[1] - values[0]), samples[1] - samples[0])
        claim = "change of calibration error, candidate minus reference"
        return *findings, self._error(claim, change, n, seed, self.most_rise)

    def _error(self, claim: str, error: Estimate, n: int, seed: int, limit: float | None = None) -> Finding:
        quantity, points, details = claim.partition(",")[0], error.scaled(100.0), {"bins": self.bins}
        return self.finding(quantity, claim, points, "points", n=n, limit=limit, side="<=", seed=seed, details=details)
