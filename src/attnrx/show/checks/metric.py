"""The metric of a call: a user's own measure of outputs and labels, of both models, and its paired change."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mean_estimate, metric_change
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.outputs import current_judgement, name_of


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
