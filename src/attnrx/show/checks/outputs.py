"""Checks of outputs, with intervals: accuracy and calibration against labels, and fidelity to the reference."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.data import FixedImages
from attnrx.exporting import Exported
from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import (
    biased_change,
    calibration_error,
    calibration_gaps,
    calibration_interval,
    mcnemar,
    mean_estimate,
    mean_share,
    metric_change,
    paired_change,
    proportion,
    resampled_means,
    studentized,
)
from attnrx.support.arguments import COUNT, Kind, each, number, optional, whole
from attnrx.support.errors import InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import family_of
from attnrx.vit.outputs import GROUP, Multilabel, current_judgement, name_of, nearest_neighbours, recalled

PatchTable = Float[Tensor, "images patches features"]
STABILIZER = 1e-12  # the epsilon of SVDA, Eq. 46
PERCENT = number(0.0, 100.0, "a share of the images in %, 0 to 100", above=False)
# COUNTS are the allowed numbers of neighbours in an `Index`, and NEIGHBOURS in `Retrieval`. Retrieval searches in
# groups of GROUP images. With more neighbours, all other images of a group would be neighbours, whatever the model.
COUNTS = each(COUNT, "numbers of neighbours, 1 or more", least=1)
VECTORS = Kind("vectors, a tensor [images, features]", lambda value: isinstance(value, Tensor) and value.ndim == 2)
NEIGHBOURS = each(whole(1, GROUP - 2), f"numbers of neighbours from 1 to {GROUP - 2}", least=1)


@dataclass(frozen=True)
class Accuracy(Check):
    """The top-1 accuracy of both models on the same images, and its change in percentage points.

    Embeddings have no classes. An embedding is correct if its nearest neighbour comes from an image with the same label
    (`attnrx.vit.outputs`), and findings call this 1-nearest-neighbour accuracy. If images have several labels, an
    output is correct if all its labels are correct (exact-match accuracy).

    The claim is that the candidate loses at most `most_drop` points. The claim holds if the whole interval of the
    change satisfies the limit, and fails if no part of the interval does. Otherwise the claim is undecided, because
    there are too few images to show such a small loss. If `most_drop` is None, the change is only reported.
    """

    needs: ClassVar[tuple[str, ...]] = ("labels", "decisions")
    most_drop: float | None = 1.0

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        predictions, seed = comparison.predictions, comparison.seed
        before, after = predictions.correct("reference"), predictions.correct("candidate")
        n, measure = len(before), predictions.kind.accuracy
        findings = []
        for role, correct in (("reference", int(before.sum())), ("candidate", int(after.sum()))):
            # A bootstrap interval would have no width at 0 or 100 %, because all resamples are equal.
            share = proportion(correct, n).scaled(100.0)
            details = {"model": role, "correct": correct, "measure": measure, "interval": "Wilson"}
            findings.append(self.finding("accuracy", f"{measure} of the {role}", share, "%", n=n, details=details))
        # Only images on which the models differ affect the change. The others cancel in a paired comparison.
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
    """The expected calibration error (ECE) of both models on the same images, and its change, in percentage points.

    An image's confidence is its largest softmax probability. Images are grouped by confidence into `bins` bins of equal
    width (Guo et al., 2017). The estimated ECE is never negative, so it is biased upwards on small image sets. Most of
    the bias cancels in the change between similar models. The intervals account for the bias
    (`statistics.calibration_interval`, `statistics.biased_change`). `most_rise` limits the change, in points. If
    `most_rise` is None, the change is only reported.
    """

    needs: ClassVar[tuple[str, ...]] = ("labels", "logits")
    bins: int = 15
    most_rise: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        kind = comparison.require_logits(self.name)
        predictions, seed = comparison.predictions, comparison.seed
        n, roles = len(predictions), ("reference", "candidate")
        gaps = []  # by model [images, bins]
        for role in roles:
            # Gaps are stored per image. The error of any resample is then a sum over the column means of its rows.
            confidence = kind.class_logits(predictions.outputs[role].double()).softmax(-1).amax(-1)
            gaps.append(calibration_gaps(confidence, predictions.correct(role), self.bins))
        # Both models share the resamples, so that the change is paired.
        # `means` is [models, bins], and `draws` is [models, draws, bins].
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
    """The mean over images of the `metric` that you pass to `verify` or `shrink`, e.g. an intersection over union.

    The findings are the mean for each model, and the mean change per image. Every finding has an interval over images.
    """

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
        means = {"reference": mean_estimate(before, seed), "candidate": mean_estimate(after, seed)}
        about, change = (name_of(judgement.metric), "mean over images"), metric_change(before, after, seed)
        return _metric_findings(self, *about, means, change, n=len(before), seed=seed)


@dataclass(frozen=True)
class MetricOfSet(Check):
    """The value of the `metric_of_set` that you pass to `verify` or `shrink`, e.g. the mean average precision.

    The findings are the value for each model, and the change from the reference to the candidate. All intervals come
    from `draws` resamples of the images, which are the same for both models.
    """

    draws: int = 200

    kinds: ClassVar[Mapping[str, Kind]] = {"draws": whole(20, 100_000)}

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        judgement, predictions, seed = current_judgement(), comparison.predictions, comparison.seed
        if judgement.metric_of_set is None:
            raise InvalidInput("the check needs the function: attnrx.verify(..., metric_of_set=...).")
        labels, n = predictions.labels, len(predictions)
        generator, everything = torch.Generator().manual_seed(seed), torch.arange(n)
        resamples = torch.randint(n, (self.draws, n), generator=generator)
        values: dict[str, Tensor] = {}  # by role [1 + draws], where the first value is for all images
        for role in ("reference", "candidate"):
            rows = predictions.outputs[role]
            found = [
                judgement.measured_set(comparison.reference, rows[drawn], labels[drawn])
                for drawn in (everything, *resamples)
            ]
            values[role] = torch.tensor(found, dtype=torch.float64)
        values["change"] = values["candidate"] - values["reference"]
        found = {role: biased_change(float(numbers[0]), numbers[1:]) for role, numbers in values.items()}
        change, measure = found.pop("change"), name_of(judgement.metric_of_set)
        return _metric_findings(self, measure, "all images", found, change, n=n, seed=seed)


def _metric_findings(
    check: Check, measure: str, over: str, values: Mapping[str, Estimate], change: Estimate, *, n: int, seed: int
) -> tuple[Finding, ...]:
    """Returns the findings on a user's metric: its value for each model, and its change."""
    about: dict[str, Any] = {"n": n, "seed": seed}
    findings = []
    for role, value in values.items():
        words, details = f"{measure} of the {role}, {over}", {"model": role, "measure": measure}
        findings.append(check.finding("metric", words, value, **about, details=details))
    words, details = f"change of {measure}, candidate minus reference", {"measure": measure}
    return *findings, check.finding("metric change", words, change, **about, details=details)


@dataclass(frozen=True)
class Fidelity(Check):
    """Relative discrepancy (SVDA, Eq. 46), agreement (Eq. 47) and divergence between the outputs of two models.

    Agreement and divergence depend on what the models return (`attnrx.vit.outputs`):

    - Class logits: the share of equal predictions, and the Kullback-Leibler divergence in nats. A single logit is first
      turned into the two probabilities of its sigmoid.
    - Logits of several labels: the share of equal label decisions, and the sum of the divergences of all labels.
    - Embeddings: the share of equal nearest neighbours, and the cosine distance.
    - A regression: no agreement, and the squared error relative to the variance.

    The SVDA paper compares the compressed model only with the masked model. This check also compares each of these two
    models with the reference. `most_discrepancy` (a share), `least_agreement` (in %) and `most_divergence` limit the
    difference between candidate and reference.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"least_agreement": optional(PERCENT)}
    most_discrepancy: float | None = None
    least_agreement: float | None = None
    most_divergence: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns three findings per pair of models, four for logits of several labels, or two for a regression.

        Raises InvalidInput if `least_agreement` is set for a regression.
        """
        if self.least_agreement is not None and not comparison.kind.has_decisions:
            raise InvalidInput(
                f"fidelity(least_agreement={self.least_agreement:g}): this model returns {comparison.kind.returns}, "
                "which make no decision; omit it."
            )
        limits = self.most_discrepancy, self.least_agreement, self.most_divergence
        findings = self._compared("reference", "candidate", comparison, *limits)
        if comparison.masked is not None and comparison.masked is not comparison.candidate:
            findings += self._compared("reference", "masked", comparison)
            findings += self._compared("masked", "candidate", comparison)
        return findings + self._at_other_sizes(comparison)

    def _at_other_sizes(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Returns findings on agreement and divergence for images of other sizes, if the data contains such images."""
        sets = comparison.data.others if isinstance(comparison.data, FixedImages) else ()
        if not sets or isinstance(comparison.candidate, Exported):  # an exported file accepts only one size
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
        most_divergence: float | None = None,
    ) -> tuple[Finding, ...]:
        """Compares the models with the roles `other` and `base`. A quantity without a limit is only reported."""
        predictions, seed = comparison.predictions, comparison.seed
        n, pair, roles = len(predictions), f"{other} against {base}", {"base": base, "other": other}
        kind, squares = predictions.kind, squared_distances(predictions.outputs[base], predictions.outputs[other])
        # Eq. 46 is defined per batch, but this value is over all images.
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
        limit = {"limit": most_divergence, "side": "<=", "seed": seed, "details": roles}
        return *findings, self.finding("divergence", words, mean, kind.unit, n=n, **limit)


def squared_distances(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images 2"]:
    """Returns, for every image, the squared norms of `other - base` and of `base` (the two sums in SVDA, Eq. 46)."""
    # The sums are per image, so that a bootstrap can resample both sums of the ratio in Eq. 46 together.
    base, other = base.double(), other.double()
    return torch.stack([(base - other).square().sum(-1), base.square().sum(-1)], dim=-1)


def discrepancy(squares: Float[Tensor, "*draws 2"]) -> Float[Tensor, "*draws"]:
    """Returns the relative logit discrepancy (SVDA, Eq. 46) from sums or means of squared distances."""
    return squares[..., 0].sqrt() / (squares[..., 1].sqrt() + STABILIZER)


@dataclass(frozen=True)
class Features(Check):
    """The error of the candidate's final patch features, relative to the reference's features.

    The relative squared error and the cosine are computed for every patch and averaged over the patches of an image.
    The intervals are computed over images. Before the comparison, pruned and merged patches are restored. `most_error`
    limits the mean relative squared error.
    """

    needs: ClassVar[tuple[str, ...]] = ("layers",)
    most_error: float | None = None

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        errors, cosines = [], []
        with evaluating((comparison.reference, comparison.candidate)):
            for batch in comparison.data.batches(comparison.batch_size, device=comparison.device):
                base, other = (
                    patch_features(model, batch.images) for model in (comparison.reference, comparison.candidate)
                )
                # The error of a patch is relative to its norm. The mean is over the patches of an image, [batch].
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
    """Computes the patch features of a batch in the dtype of the model's weights, and returns them in float64."""
    return family_of(model).patch_features(model, images.to(next(model.parameters()).dtype)).double()


@dataclass(frozen=True)
class Retrieval(Check):
    """The share of every image's nearest neighbours that the candidate keeps.

    For every k in `ks`, an image's k nearest neighbours by cosine similarity are searched in its group of `GROUP`
    consecutive images. If the last group has at most k + 1 images, it is not counted, because all of its images are
    then neighbours of each other in every model.
    """

    needs: ClassVar[tuple[str, ...]] = ("embeddings",)
    kinds: ClassVar[Mapping[str, Kind]] = {"ks": NEIGHBOURS}
    ks: tuple[int, ...] = (1, 5, 10)

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
            before, after = (nearest_neighbours(outputs[:counted], k) for outputs in (base, other))
            # [images, k of base, k of other]. Sets are compared, so the order of the k neighbours does not count.
            recall = (before[:, :, None] == after[:, None, :]).any(-1).double().mean(1)
            claim = f"share of the {k} nearest neighbours of an image that the candidate keeps"
            share = mean_share(recall, seed).scaled(100.0)
            findings.append(self.finding(f"recall at {k}", claim, share, "%", n=counted, seed=seed))
        return tuple(findings)


@dataclass(frozen=True)
class Index(Check):
    """The share of the reference's k nearest neighbours that queries still find in an index, for every k in `ks`.

    Every image is a query, and by default all other images form the index. New queries are embedded by the candidate,
    and searched among the reference's vectors. Old queries are embedded by the reference, and searched among the
    candidate's vectors. The search is exact and compares vectors by cosine similarity. In a larger index, neighbours
    are closer to each other and harder to keep.

    To search in your own index, pass its vectors as `stored`. The reference must have computed these vectors, and the
    query images must not be in the index. Old queries are then not evaluated.

    `least_recall` is the smallest allowed share of found neighbours, in %, for new queries and the last k in `ks`.
    """

    needs: ClassVar[tuple[str, ...]] = ("embeddings",)
    kinds: ClassVar[Mapping[str, Kind]] = {"ks": COUNTS, "least_recall": optional(PERCENT), "stored": optional(VECTORS)}
    ks: tuple[int, ...] = (1, 10)
    least_recall: float | None = None
    stored: Tensor | None = field(default=None, compare=False, repr=False)
    least: ClassVar[int] = 12
    """The fewest images for the usual `ks`. In a smaller index, every model finds all neighbours."""

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        outputs, seed = comparison.predictions.outputs, comparison.seed
        old, new = outputs["reference"], outputs["candidate"]
        size = len(old) - 1 if self.stored is None else len(self.stored)
        if size <= max(self.ks):
            raise InvalidInput(
                f"{self.name}: an index of {size} images has no more than {max(self.ks)} neighbours, which every model "
                f"finds; give at least {max(self.ks) + 2} images, or fewer neighbours, as in {self.name}(ks=1)."
            )
        if self.stored is None:
            own = torch.arange(len(old), device=old.device)
            pairs = {"new queries in the old index": (new, old), "old queries in the new index": (old, new)}
            base = old
        else:
            own, base = None, self.stored.detach().to(old.device)
            if base.shape[1] != old.shape[1]:
                raise InvalidInput(
                    f"{self.name}: the stored vectors have {base.shape[1]} numbers, and those of the models "
                    f"{old.shape[1]}: pass vectors that the reference made, [images, {old.shape[1]}]."
                )
            pairs = {"new queries in the old index": (new, base)}
        return tuple(
            self._finding(direction, k, share, size, seed)
            for direction, pair in pairs.items()
            for k, share in zip(self.ks, recalled((old, base), pair, self.ks, own).unbind(1), strict=True)
        )

    def _finding(self, direction: str, k: int, shares: Float[Tensor, "images"], size: int, seed: int) -> Finding:
        is_new = direction.startswith("new")
        limit = self.least_recall if is_new and k == self.ks[-1] else None
        claim = f"share of the {k} nearest neighbours that are found, {direction}"
        share, details = mean_share(shares, seed).scaled(100.0), {"k": k, "index": size}
        quantity = "index recall" if is_new else "index recall of old queries"
        return self.finding(quantity, claim, share, "%", n=len(shares), limit=limit, seed=seed, details=details)
