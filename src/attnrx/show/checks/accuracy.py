"""Accuracy: top-1 accuracy of both models, of embeddings that of their nearest neighbours, and its paired change."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mcnemar, paired_change, proportion


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
