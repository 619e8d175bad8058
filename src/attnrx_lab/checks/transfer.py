"""Transfer: the accuracy of a new head trained on another dataset, on the frozen features of each model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from attnrx.checks.accuracy import change_of_accuracy
from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.checks.statistics import mean_change, mean_estimate
from attnrx.data import ImageSet, own_labels
from attnrx.data.images import generator
from attnrx.errors import DataError, InvalidInput
from attnrx.evidence import Finding
from attnrx.models import evaluating, family_of, head_features
from attnrx.shapes import Float, Int, Tensor


@dataclass(frozen=True)
class Transfer(Check):
    """The paired change of accuracy on another dataset, with a new head on each model (SPOT, Section 6.2.2).

    Everything but the head is frozen, so the features are computed once for every image. Then a linear head is trained
    on
    the labels of the `training` images; the comparison's images are the test. Both heads are trained in the same way:
    the
    same images in the same order and, if the features have equal width, from the same weights. AdamW, the learning rate
    and
    the epochs are the paper's, the batch size is that of its other trainings; the rest is not stated there: PyTorch's
    weight
    decay, a cosine schedule to zero, no augmentation, and the inputs of the model's own head as features, in float32.

    `per_class` is the number of training images per class, None for all; `classes` are those of the dataset. An image
    counts by the share of the `seeds` whose head is right, so intervals are over images only; the details contain the
    change of every seed. A model with two heads (distilled) uses both. `most_drop` limits, in points, the loss of the
    candidate; None only reports.
    """

    name: ClassVar[str] = "transfer"
    on_request: ClassVar[bool] = True
    training: ImageSet
    classes: int
    per_class: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 80
    learning_rate: float = 0.025
    batch_size: int = 512
    weight_decay: float = 0.01
    most_drop: float | None = None

    def __post_init__(self):
        if self.classes < 2:
            raise InvalidInput(
                f"Transfer(classes={self.classes}): a head separates at least two classes; use a dataset with more."
            )
        counts = {"epochs": self.epochs, "batch_size": self.batch_size, "per_class": self.per_class}
        low = [name for name, count in counts.items() if count is not None and count < 1]
        if low or not self.seeds or min(self.seeds) < 0 or self.learning_rate <= 0 or self.weight_decay < 0:
            raise InvalidInput(
                f"Transfer(per_class={self.per_class}, seeds={self.seeds}, epochs={self.epochs}, "
                f"learning_rate={self.learning_rate}, batch_size={self.batch_size}, weight_decay={self.weight_decay}): "
                "give at least one image, epoch and seed, a learning rate above 0 and a decay that is not negative."
            )

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        return self.of_each({"candidate": comparison.candidate}, comparison)["candidate"]

    def of_each(self, candidates: Mapping[str, nn.Module], comparison: Comparison) -> dict[str, tuple[Finding, ...]]:
        """Returns the findings of several candidates; the features and head of the reference are computed only once."""
        training = own_labels(self._taken())
        reference = self._probed("reference", comparison.reference, training, comparison)
        return {
            name: self._findings(reference, self._probed(name, model, training, comparison), len(training), comparison)
            for name, model in candidates.items()
        }

    def _taken(self) -> ImageSet:
        if self.per_class is None:
            return self.training
        count = self.per_class * self.classes
        if count > len(self.training):
            raise InvalidInput(
                f"Transfer(per_class={self.per_class}): {count:,} images of {self.classes} classes were requested, the "
                f"training split holds {len(self.training):,}; ask for fewer."
            )
        return self.training.take(count)

    def _probed(
        self, role: str, model: nn.Module, training: ImageSet, comparison: Comparison
    ) -> Float[Tensor, "seeds images"]:
        """Returns 1 for every seed and test image that is classified as labelled, else 0."""
        seen, test = (_features(role, model, images, comparison) for images in (training, own_labels(comparison.data)))
        strange = sorted(set(test.labels.tolist()) - set(seen.labels.tolist()))
        if strange or int(test.labels.max()) >= self.classes:
            raise DataError(
                f"the test images have the label(s) {strange[:5]}, and no training image of {self.classes} classes "
                "does; use more training images, or splits of one dataset."
            )
        if len(seen.labels.unique()) < 2:
            raise DataError("all training images are of one class; a head needs at least two to learn.")
        heads = [self._head(seen, seed) for seed in self.seeds]
        return torch.stack([(head(test.rows).argmax(-1) == test.labels).double() for head in heads]).cpu()

    @torch.enable_grad()
    def _head(self, seen: "_Features", seed: int) -> nn.Linear:
        draws, (count, width) = generator(seed), seen.rows.shape
        head = nn.Linear(width, self.classes, device=seen.rows.device, dtype=seen.rows.dtype)
        bound = width**-0.5  # PyTorch's start, but from draws on the CPU: the same on every device
        with torch.no_grad():
            for parameter in head.parameters():
                drawn = torch.rand(parameter.shape, generator=draws, dtype=parameter.dtype)
                parameter.copy_(bound * (2 * drawn - 1))
        optimizer = torch.optim.AdamW(head.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        steps = self.epochs * -(-count // self.batch_size)  # the last, smaller batch counts
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(self.epochs):
            for rows in torch.randperm(count, generator=draws).to(seen.rows.device).split(self.batch_size):
                optimizer.zero_grad()
                functional.cross_entropy(head(seen.rows[rows]), seen.labels[rows]).backward()
                optimizer.step()
                schedule.step()
        return head.requires_grad_(False)

    def _findings(self, before: Tensor, after: Tensor, trained_on: int, comparison: Comparison) -> tuple[Finding, ...]:
        details = {
            "quantity": "accuracy change",
            "seeds": list(self.seeds),
            "by_seed": (100 * (after - before).mean(1)).tolist(),
            "training_images": trained_on,
            "training": self.training.fingerprint,
            "interval": "paired bootstrap over images",
        }
        change = mean_change(after.mean(0) - before.mean(0), comparison.seed)
        finding = change_of_accuracy(self.name, " of a fresh head", change, self.most_drop, before.shape[1])
        return (
            self._accuracy("reference", before, comparison.seed),
            self._accuracy("candidate", after, comparison.seed),
            replace(finding, seed=comparison.seed, details=details),
        )

    def _accuracy(self, role: str, right: Tensor, seed: int) -> Finding:
        share = mean_estimate(right.mean(0), seed).scaled(100.0)
        details = {"quantity": "accuracy", "model": role, "by_seed": (100 * right.mean(1)).tolist()}
        claim = f"top-1 accuracy of a fresh head on the {role}"
        known = {"low": share.low, "high": share.high, "n": right.shape[1], "seed": seed, "details": details}
        return Finding(self.name, claim, share.value, "%", **known)


@dataclass(frozen=True)
class _Features:
    """The inputs of a model's head for every image, in the order of the images' rows in their source."""

    rows: Float[Tensor, "images features"]
    labels: Int[Tensor, "images"]


def _features(role: str, model: nn.Module, images: ImageSet, comparison: Comparison) -> _Features:
    heads = family_of(model).heads(model)
    if not heads:
        raise InvalidInput(
            f"the {role} has no classification head, so its features are not defined; use a "
            "model with a head (in timm, num_classes above 0)."
        )
    rows, labels, index = [], [], []
    dtype = next(model.parameters()).dtype
    with evaluating([model]):
        for batch in images.batches(comparison.batch_size, device=comparison.device):
            rows.append(head_features(model, heads, batch.images.to(dtype)))
            labels.append(batch.labels)
            index.append(batch.index)
    features = torch.cat(rows).float()
    if not bool(torch.isfinite(features).all()):
        raise InvalidInput(
            f"the {role} gives features that are NaN or infinite; check its weights and the normalization of the data."
        )
    # Loaders may return images in any order; heads of all models need the same rows in the same order.
    order = torch.cat(index).argsort(stable=True)
    return _Features(features[order], torch.cat(labels)[order])
