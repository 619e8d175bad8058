"""Accuracy: top-1 accuracy of both models, of embeddings that of their nearest neighbours, and its paired change."""

from dataclasses import dataclass, replace
from typing import ClassVar

from attnrx.nouns.evidence import Estimate, Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mcnemar, paired_change, proportion
from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.outputs import Logits

TOP_1 = Logits.accuracy


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
    needs_labels: ClassVar[bool] = True
    needs_decisions: ClassVar[bool] = True
    most_drop: float | None = 1.0

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        predictions, seed = comparison.predictions, comparison.seed
        before, after = predictions.correct("reference"), predictions.correct("candidate")
        # Only images on which the models differ decide about the change; the others cancel in a paired comparison.
        lost, gained = int((before & ~after).sum()), int((~before & after).sum())
        details = {
            "quantity": "accuracy change",
            "lost": lost,
            "gained": gained,
            "mcnemar_p": mcnemar(lost, gained),
            "measure": (measure := predictions.kind.accuracy),
            "interval": "paired bootstrap over images",
        }
        estimate, n = paired_change(before, after, seed), len(before)
        change = change_of_accuracy(self.name, "", estimate, self.most_drop, n, measure)
        roles = (("reference", before), ("candidate", after))
        accuracies = (self._of(role, correct, measure) for role, correct in roles)
        return (*accuracies, replace(change, seed=seed, details=details))

    def _of(self, role: str, is_correct: Bool[Tensor, "images"], measure: str) -> Finding:
        correct, n = int(is_correct.sum()), len(is_correct)
        details = {"quantity": "accuracy", "model": role, "correct": correct, "measure": measure, "interval": "Wilson"}
        # Not a bootstrap: at 0 or 100 % all resamples are equal, and the interval would have no width.
        share = proportion(correct, n).scaled(100.0)
        return Finding(self.name, f"{measure} of the {role}", unit="%", **share.judged(n), details=details)


def change_of_accuracy(
    check: str, where: str, change: Estimate, most_drop: float | None, n: int, measure: str = TOP_1
) -> Finding:
    """Returns the finding for a paired change of accuracy, in points; a claim unless `most_drop` is None.

    `n` is the number of images. `where` is appended to the claim, e.g. " over all corruptions". `measure` is what is
    counted as correct.
    """
    noun = "accuracy" if measure == TOP_1 else measure
    # A claim has no measured number in its text, so that runs can be compared claim by claim.
    claim, limit = f"change of {noun}{where}, candidate minus reference", None
    if most_drop is not None:
        claim, limit = f"the candidate loses at most {most_drop:g} points of {noun}{where}", -most_drop
    return Finding(check, claim, unit="points", **change.scaled(100.0).judged(n, limit))
