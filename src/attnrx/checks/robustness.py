"""Robustness: whether the candidate bears spoilt images as its reference does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from attnrx.checks.accuracy import change_of_accuracy
from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison, Predictions, answer
from attnrx.checks.statistics import mcnemar, mean_change, paired_change, proportion
from attnrx.data import CORRUPTIONS, SEVERITIES, Batch, Corruption, Normalization
from attnrx.errors import InvalidInput, UnknownName
from attnrx.evidence import Finding
from attnrx.models import evaluating, family_of
from attnrx.shapes import Float, Tensor

# How far outside [0, 1] pixels may lie after the normalization was undone: its rounding.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Robustness(Check):
    """The paired change of accuracy on spoilt images, one finding per corruption and severity and one over all.

    Each finding also tells both accuracies and how often the models agree. Both models see the very same spoilt images,
    whatever the batch size; only the first `images` (None: all) are used. `most_drop` limits, in points, what the
    candidate loses over all corruptions, in the same sense as the accuracy check; None only reports.
    """

    name: ClassVar[str] = "robustness"
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = SEVERITIES
    images: int | None = 2000
    most_drop: float | None = None

    def __post_init__(self):
        if not self.corruptions or not self.severities or (self.images is not None and self.images < 1):
            raise InvalidInput(
                f"Robustness(corruptions={self.corruptions}, severities={self.severities}, images={self.images}): "
                "give at least one of each."
            )
        for name in self.corruptions:
            if name not in CORRUPTIONS:
                raise UnknownName("corruption", name, CORRUPTIONS)
        if not set(self.severities) <= set(SEVERITIES):
            raise InvalidInput(f"Robustness(severities={self.severities}): choose from {SEVERITIES}, 1 is the mildest.")

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Spoils the images in every way and lets both models answer."""
        comparison = comparison.taking(self.images)
        findings, changes = [], []
        for name in self.corruptions:
            for severity in self.severities:
                predictions = self._predict(CORRUPTIONS[name], severity, comparison)
                findings.append(self._finding(name, severity, predictions, comparison.seed))
                changes.append(predictions.correct("candidate").double() - predictions.correct("reference").double())
        return (*findings, self._overall(torch.stack(changes).mean(0), comparison.seed))

    def _predict(self, corruption: Corruption, severity: int, comparison: Comparison) -> Predictions:
        models = {"reference": comparison.reference, "candidate": comparison.candidate}
        logits: dict[str, list[Tensor]] = {role: [] for role in models}
        labels = []
        with evaluating(models.values()):
            for batch, images in _spoilt(corruption, severity, comparison):
                labels.append(batch.labels.cpu())
                for role, model in models.items():
                    logits[role].append(answer(model, images).cpu())
        return Predictions({role: torch.cat(parts) for role, parts in logits.items()}, torch.cat(labels))

    def _finding(self, corruption: str, severity: int, predictions: Predictions, seed: int) -> Finding:
        before, after = predictions.correct("reference"), predictions.correct("candidate")
        agreeing = int((predictions.classes("reference") == predictions.classes("candidate")).sum())
        agreement = proportion(agreeing, len(predictions)).scaled(100.0)
        details = {
            "quantity": "accuracy change",
            "corruption": corruption,
            "severity": severity,
            "reference_accuracy": 100 * float(before.double().mean()),
            "candidate_accuracy": 100 * float(after.double().mean()),
            "agreement": {"value": agreement.value, "low": agreement.low, "high": agreement.high},
            "mcnemar_p": mcnemar(int((before & ~after).sum()), int((~before & after).sum())),
        }
        where = f" under {corruption} of severity {severity}"
        finding = change_of_accuracy(self.name, where, paired_change(before, after, seed), None)
        return replace(finding, n=len(predictions), seed=seed, details=details)

    def _overall(self, changes: Float[Tensor, "images"], seed: int) -> Finding:
        details = {
            "quantity": "overall accuracy change",
            "corruptions": list(self.corruptions),
            "severities": list(self.severities),
        }
        change = mean_change(changes, seed)
        finding = change_of_accuracy(self.name, " over all corruptions", change, self.most_drop)
        return replace(finding, n=len(changes), seed=seed, details=details)


def _spoilt(corruption: Corruption, severity: int, comparison: Comparison) -> Iterator[tuple[Batch, Tensor]]:
    """Gives the batches with their images spoilt on the device, back on the model's scale."""
    normalization = Normalization(*family_of(comparison.reference).normalization(comparison.reference))
    # One stream of random numbers on the CPU for the whole pass: the same noise in batches of any size, on any device.
    generator = torch.Generator().manual_seed(comparison.seed)
    for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
        pixels = normalization.invert(batch.images)
        if float(pixels.min()) < -ROUNDING or float(pixels.max()) > 1 + ROUNDING:
            raise InvalidInput(
                f"the images, taken back from the model's normalization (mean {normalization.mean}, std "
                f"{normalization.std}), leave [0, 1]: they were normalized otherwise. Use data.renormalized(...) first."
            )
        yield batch, normalization.apply(corruption(pixels.clamp(0, 1), severity, generator))
