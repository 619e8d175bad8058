"""Differences between methods at one budget, paired over the images, with p-values corrected for their number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from attnrx.checks.statistics import Estimate, holm, mcnemar, mean_estimate, paired_change, sign_flip_test
from attnrx.shapes import Bool, Float, Tensor


@dataclass(frozen=True)
class ImageResults:
    """The results of one method at one budget, image by image: the KL divergence in nats, and whether the class is
    right.

    `budget` is the requested share or the target share of the MACs; None if the rules of the method are fixed.
    """

    method: str
    budget: tuple[float | None, float | None]
    divergence: Float[Tensor, "images"]
    correct: Bool[Tensor, "images"]


@dataclass(frozen=True)
class Difference:
    """The second method minus the first at one budget: KL in nats (above 0: the second is worse), top-1 in points.

    Intervals are 95 % bootstrap intervals over the images, each for its own difference. `divergence_p` is of a paired
    sign-flip test of the mean, `accuracy_p` of McNemar's exact test; both are corrected by Holm's method over all
    differences of the comparison in that measure.
    """

    first: str
    second: str
    share: float | None
    target: float | None
    divergence: Estimate
    divergence_p: float
    accuracy: Estimate
    accuracy_p: float
    n: int

    @property
    def budget(self) -> str:
        if self.target is not None:
            return f"{100 * self.target:g} % of the MACs"
        return "fixed rules" if self.share is None else f"{100 * self.share:g} % kept"

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.second} minus {self.first}",
            self.budget,
            self.divergence.text(3),
            f"{self.divergence_p:.3g}",
            self.accuracy.text(1),
            f"{self.accuracy_p:.3g}",
        )


def paired_differences(results: Sequence[ImageResults], seed: int) -> tuple[Difference, ...]:
    """Compares every two methods that were measured at the same budget, in the order of the results."""
    pairs = [pair for pair in combinations(results, 2) if pair[0].budget == pair[1].budget]
    found = [_difference(first, second, seed) for first, second in pairs]
    divergence = holm([each.divergence_p for each in found])
    accuracy = holm([each.accuracy_p for each in found])
    return tuple(
        replace(each, divergence_p=own, accuracy_p=other)
        for each, own, other in zip(found, divergence, accuracy, strict=True)
    )


def _difference(first: ImageResults, second: ImageResults, seed: int) -> Difference:
    share, target = first.budget
    further = second.divergence - first.divergence
    lost, gained = int((first.correct & ~second.correct).sum()), int((~first.correct & second.correct).sum())
    return Difference(
        first.method,
        second.method,
        share,
        target,
        mean_estimate(further, seed),
        sign_flip_test(further, seed),
        paired_change(first.correct, second.correct, seed).scaled(100.0),
        mcnemar(lost, gained),
        len(further),
    )
