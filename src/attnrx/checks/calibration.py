"""Calibration: the expected calibration error of both models and its change."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.checks.statistics import calibration_error, calibration_gaps, estimate, resampled_means
from attnrx.errors import InvalidInput
from attnrx.evidence import Finding


@dataclass(frozen=True)
class Calibration(Check):
    """The expected calibration error (ECE) of both models and its paired change, in points.

    Confidence is the largest softmax probability, in `bins` bins of equal width (Guo et al., 2017). The ECE estimate is
    non-negative and therefore biased upwards on few images; most of the bias cancels in the change. `most_rise` limits
    the change, in points; with None the change is only reported.
    """

    name: ClassVar[str] = "calibration"
    needs_labels: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = True
    bins: int = 15
    most_rise: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        if comparison.kind.name != "logits":
            raise InvalidInput("the check calibration needs probabilities; this model returns embeddings.")
        predictions, seed = comparison.predictions, comparison.seed
        n, roles = len(predictions), ("reference", "candidate")
        gaps = []  # by model [images, bins]
        for role in roles:
            # Of every image, from which the error of any resample is a mean of columns and a sum.
            confidence = predictions.outputs[role].double().softmax(-1).amax(-1)
            gaps.append(calibration_gaps(confidence, predictions.correct(role), self.bins))
        values = [float(100 * calibration_error(gap.mean(0))) for gap in gaps]
        # Both models share the resamples, so that the change is paired. [draws, models]
        draws = 100 * calibration_error(resampled_means(torch.cat(gaps, dim=1), seed).unflatten(1, (2, self.bins)))
        judged = {
            f"expected calibration error of the {role}": estimate(value, samples).judged(n)
            for role, value, samples in zip(roles, values, draws.T, strict=True)
        }
        change = estimate(values[1] - values[0], draws[:, 1] - draws[:, 0])
        claim = "change of calibration error, candidate minus reference"
        judged[claim] = change.judged(n, self.most_rise, at_least=False)
        return tuple(
            Finding(
                self.name,
                claim,
                unit="points",
                **fields,
                seed=seed,
                details={"quantity": claim.partition(",")[0], "bins": self.bins},
            )
            for claim, fields in judged.items()
        )
