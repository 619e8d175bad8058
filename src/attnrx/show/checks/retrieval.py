"""Retrieval: the neighbours that embeddings keep."""

from dataclasses import dataclass
from typing import ClassVar

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.show.checks.statistics import mean_share
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.outputs import GROUP, nearest_neighbours


@dataclass(frozen=True)
class Retrieval(Check):
    """The share of the nearest neighbours of every image that the candidate keeps.

    The k nearest neighbours by cosine similarity are sought among `GROUP` consecutive images, for every k of `ks`. A
    group of at most k + 1 images has no others, and is not counted.
    """

    name: ClassVar[str] = "retrieval"
    on_request: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("embeddings",)
    ks: tuple[int, ...] = (1, 5, 10)

    def __post_init__(self):
        super().__post_init__()
        # All other images of a group are neighbours for any model.
        if not self.ks or not all(0 < k < GROUP - 1 for k in self.ks):
            raise InvalidInput(f"{self.name}(ks={self.ks}): give numbers of neighbours from 1 to {GROUP - 2}.")

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        outputs, n, seed = comparison.predictions.outputs, len(comparison.predictions), comparison.seed
        base, other = outputs["reference"], outputs["candidate"]
        findings = []
        for k in self.ks:
            counted = n if n % GROUP > k + 1 else n - n % GROUP
            if not counted:
                raise InvalidInput(
                    f"{self.name}(ks={k}): {n} images have no more than {k} neighbours each, which every model keeps; "
                    f"give at least {k + 2} images, or fewer neighbours, as in {self.name}(ks=1)."
                )
            recall = neighbours_kept(*(nearest_neighbours(outputs[:counted], k) for outputs in (base, other)))
            claim = f"share of the {k} nearest neighbours of an image that the candidate keeps"
            share = mean_share(recall, seed).scaled(100.0)
            findings.append(self.finding(f"recall at {k}", claim, share, "%", n=counted, seed=seed))
        return tuple(findings)


def neighbours_kept(base: Int[Tensor, "images k"], other: Int[Tensor, "images k"]) -> Float[Tensor, "images"]:
    """Returns the share of the neighbours in `base` that are in `other`, per image."""
    # [images, k of base, k of other]: sets are compared, and the order within the k does not count.
    return (base[:, :, None] == other[:, None, :]).any(-1).double().mean(1)
