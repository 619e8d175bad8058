"""Outputs against outputs: discrepancy, agreement and divergence, features of patches, and neighbours of embeddings."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from attnrx.change.exporting import Exported
from attnrx.data import FixedImages
from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import mean_estimate, mean_share, studentized
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.models import evaluating, family_of
from attnrx.vit.outputs import GROUP, Multilabel, nearest_neighbours

PatchTable = Float[Tensor, "images patches features"]
# The stabilizer epsilon of SVDA, Eq. 46.
STABILIZER = 1e-12


@dataclass(frozen=True)
class Fidelity(Check):
    """Relative discrepancy (SVDA, Eq. 46), agreement (Eq. 47) and divergence of the outputs of pairs of models.

    Of logits, predictions agree and the divergence is that of Kullback and Leibler in nats (of one logit: that of the
    sigmoid's probabilities; of the logits of labels: the sum of theirs, and label decisions agree); of embeddings,
    nearest neighbours agree and the divergence is the cosine distance; of a regression, the divergence is the squared
    error relative to the variance, and there is no agreement (`attnrx.vit.outputs`).

    The paper compares the compressed model with the masked one only; here both are compared with the reference too.
    `most_discrepancy` (a share) and `least_agreement` (in %) are limits for the candidate against the reference.
    """

    name: ClassVar[str] = "fidelity"
    most_discrepancy: float | None = None
    least_agreement: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.least_agreement is not None and not 0 <= self.least_agreement <= 100:
            raise InvalidInput(f"least_agreement={self.least_agreement}: give a share of the images in %, 0 to 100.")

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns three findings per pair of models, of labels four and of a regression two.

        Raises InvalidInput for a limit of the agreement of a regression.
        """
        if self.least_agreement is not None and not comparison.kind.has_decisions:
            raise InvalidInput(
                f"fidelity(least_agreement={self.least_agreement:g}): this model returns {comparison.kind.returns}, "
                "which make no decision; omit it."
            )
        findings = self._compared("reference", "candidate", comparison, self.most_discrepancy, self.least_agreement)
        if comparison.masked is not None and comparison.masked is not comparison.candidate:
            findings += self._compared("reference", "masked", comparison)
            findings += self._compared("masked", "candidate", comparison)
        return findings + self._at_other_sizes(comparison)

    def _at_other_sizes(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns the agreement and the divergence on the images of other sizes, all of them together."""
        sets = comparison.data.others if isinstance(comparison.data, FixedImages) else ()
        if not sets or isinstance(comparison.candidate, Exported):  # a file has one size
            return ()
        kind, roles = comparison.kind, ("reference", "candidate")
        found = [replace(comparison, data=images, masked=None, _cache={}).predictions for images in sets]
        n, details = sum(map(len, found)), {"sizes": len(sets)}
        divergences = torch.cat([each.divergence(*roles) for each in found])
        words = f"{kind.distance} of the candidate from the reference, at other sizes of images"
        measured, seed = mean_estimate(divergences, comparison.seed), comparison.seed
        findings = [
            self.finding("divergence at other sizes", words, measured, kind.unit, n=n, seed=seed, details=details)
        ]
        if kind.has_decisions:
            agreeing = torch.cat([each.agreement(*roles) for each in found])
            share = mean_share(agreeing, seed).scaled(100.0)
            words = f"{kind.decision} agreement, candidate against reference, at other sizes of images"
            findings.append(self.finding("agreement at other sizes", words, share, "%", n=n, details=details))
        return tuple(findings)

    def _compared(
        self,
        base: str,
        other: str,
        comparison: Comparison,
        most_discrepancy: float | None = None,
        least_agreement: float | None = None,
    ) -> tuple[Finding, ...]:
        """Compares the model of the role `other` with that of the role `base`; what has no limit is reported."""
        predictions, seed = comparison.predictions, comparison.seed
        n, pair, roles = len(predictions), f"{other} against {base}", {"base": base, "other": other}
        kind, squares = predictions.kind, squared_distances(predictions.outputs[base], predictions.outputs[other])
        # Eq. 46 is defined per batch; the value of the finding is over all images.
        distance = studentized(squares, discrepancy, seed, minimum=0.0)
        words, limit = f"relative {kind.noun} discrepancy, {pair}", most_discrepancy
        findings = [self.finding("discrepancy", words, distance, n=n, limit=limit, side="<=", seed=seed, details=roles)]
        if kind.has_decisions:
            agreeing = predictions.agreement(base, other)
            share, words = mean_share(agreeing, seed).scaled(100.0), f"{kind.decision} agreement, {pair}"
            findings.append(self.finding("agreement", words, share, "%", n=n, limit=least_agreement, details=roles))
            if isinstance(kind, Multilabel):
                words = f"images with all {kind.decision}s equal, {pair}"
                share = mean_share((agreeing == 1).double(), seed).scaled(100.0)
                findings.append(self.finding("exact agreement", words, share, "%", n=n, details=roles))
        mean, words = mean_estimate(predictions.divergence(base, other), seed), f"mean {kind.distance}, {pair}"
        return *findings, self.finding("divergence", words, mean, kind.unit, n=n, seed=seed, details=roles)


def squared_distances(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images 2"]:
    """Returns the squared norms of the difference and of the base per image: the two sums of SVDA, Eq. 46."""
    # Sums per image, because the ratio of Eq. 46 is of sums: a bootstrap resamples both together.
    base, other = base.double(), other.double()
    return torch.stack([(base - other).square().sum(-1), base.square().sum(-1)], dim=-1)


def discrepancy(squares: Float[Tensor, "*draws 2"]) -> Float[Tensor, "*draws"]:
    """Returns the relative logit discrepancy (SVDA, Eq. 46) from sums or means of squared distances."""
    return squares[..., 0].sqrt() / (squares[..., 1].sqrt() + STABILIZER)


@dataclass(frozen=True)
class Features(Check):
    """The error of the last features of all patches, candidate against reference.

    The relative squared error and the cosine of every patch, averaged over the patches of an image; intervals are over
    images. Pruned and merged patches are restored. `most_error` is a limit for the mean relative squared error.
    """

    name: ClassVar[str] = "features"
    on_request: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("layers",)
    most_error: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        errors, cosines = [], []
        with evaluating((comparison.reference, comparison.candidate)):
            for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
                base, other = (
                    patch_features(model, batch.images) for model in (comparison.reference, comparison.candidate)
                )
                # By patch, relative to its own norm, then the mean over the patches of an image: [batch].
                errors.append(((base - other).square().sum(-1) / base.square().sum(-1)).mean(1).cpu())
                cosines.append(torch.cosine_similarity(base, other, dim=-1).mean(1).cpu())
        n, seed, pair = len(comparison.data), comparison.seed, "of the features of a patch, candidate against reference"
        error, cosine = mean_estimate(torch.cat(errors), seed), mean_estimate(torch.cat(cosines), seed)
        claim, most = f"relative squared error {pair}", self.most_error
        return (
            self.finding("feature error", claim, error, n=n, limit=most, side="<=", seed=seed),
            self.finding("feature cosine", f"cosine {pair}", cosine, n=n, seed=seed),
        )


def patch_features(model: nn.Module, images: Float[Tensor, "batch channels height width"]) -> PatchTable:
    """Returns the features of all patches of a batch in float64, computed in the dtype of the model's weights."""
    return family_of(model).patch_features(model, images.to(next(model.parameters()).dtype)).double()


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
