"""Answers against labels: accuracy, calibration, and a user's own metric, of both models with their paired change."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.nouns.evidence import Estimate, Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import (
    biased_change,
    calibration_error,
    calibration_gaps,
    calibration_interval,
    mcnemar,
    mean_estimate,
    metric_change,
    paired_change,
    proportion,
    resampled_means,
)
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.outputs import current_judgement, name_of


@dataclass(frozen=True)
class Accuracy(Check):
    """The paired change of top-1 accuracy, in points, with the accuracy of both models.

    Embeddings have no classes: theirs is the accuracy of the label of the nearest neighbour (`attnrx.vit.outputs`),
    and is called 1-nearest-neighbour accuracy in the findings. Of several labels per image all must be right: exact-
    match accuracy.

    The claim is that the candidate loses at most `most_drop` points. It holds if the whole interval of the change
    satisfies the limit, fails if no part of it does, and is undecided otherwise: a small image set cannot show a small
    loss. With None the change is only reported.
    """

    name: ClassVar[str] = "accuracy"
    needs: ClassVar[tuple[str, ...]] = ("labels", "decisions")
    most_drop: float | None = 1.0

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        predictions, seed = comparison.predictions, comparison.seed
        before, after = predictions.correct("reference"), predictions.correct("candidate")
        n, measure = len(before), predictions.kind.accuracy
        findings = []
        for role, correct in (("reference", int(before.sum())), ("candidate", int(after.sum()))):
            # Not a bootstrap: at 0 or 100 % all resamples are equal, and the interval would have no width.
            share = proportion(correct, n).scaled(100.0)
            details = {"model": role, "correct": correct, "measure": measure, "interval": "Wilson"}
            findings.append(self.finding("accuracy", f"{measure} of the {role}", share, "%", n=n, details=details))
        # Only images on which the models differ decide about the change; the others cancel in a paired comparison.
        lost, gained = int((before & ~after).sum()), int((~before & after).sum())
        details = {"lost": lost, "gained": gained, "mcnemar_p": mcnemar(lost, gained), "measure": measure}
        details["interval"] = "paired bootstrap over images"
        change = paired_change(before, after, seed)
        return (
            *findings,
            self.change_of_accuracy("", change, self.most_drop, n, measure=measure, seed=seed, details=details),
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


@dataclass(frozen=True)
class Metric(Check):
    """The mean over images of the `metric` that `verify` or `shrink` was given, e.g. an intersection over union.

    The findings are the means of both models, and the mean of the change per image, all with intervals over images.
    """

    name: ClassVar[str] = "metric"
    on_request: ClassVar[bool] = True

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        judgement, predictions, seed = current_judgement(), comparison.predictions, comparison.seed
        if judgement.metric is None:
            raise InvalidInput("the check metric needs the function: attnrx.verify(..., metric=...).")
        values: dict[str, list[Tensor]] = {"reference": [], "candidate": []}
        start = 0
        for batch in comparison.data.batches(comparison.batch_size, device=torch.device("cpu")):
            for role, parts in values.items():
                rows = predictions.outputs[role][start : start + len(batch)]
                parts.append(judgement.measured(comparison.reference, rows, (batch.images, batch.labels), "metric"))
            start += len(batch)
        before, after = (torch.cat(parts) for parts in values.values())
        n, measure = len(before), name_of(judgement.metric)
        findings = [
            self.finding(
                "metric",
                f"{measure} of the {role}, mean over images",
                mean_estimate(each, seed),
                n=n,
                seed=seed,
                details={"model": role, "measure": measure},
            )
            for role, each in (("reference", before), ("candidate", after))
        ]
        change, words = metric_change(before, after, seed), f"change of {measure}, candidate minus reference"
        details = {"measure": measure}
        return *findings, self.finding("metric change", words, change, n=n, seed=seed, details=details)
