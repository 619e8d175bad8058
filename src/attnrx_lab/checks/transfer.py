"""The check `Transfer`, which trains a new head on each model's frozen features and measures its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional

from attnrx.data import ImageSet, LoadedImages, Splits, require_labelled
from attnrx.data.images import generator
from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check, Comparison
from attnrx.show.checks.statistics import mean_change, mean_share
from attnrx.support.errors import DataError, InvalidInput
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Float, ImageBatch, Int, Tensor
from attnrx.vit.models import family_of, recording_calls

# The batch size of the paper's other trainings. Settings that the paper does not state are PyTorch's defaults.
BATCH_SIZE = 512

Features = tuple[Float[Tensor, "images features"], Int[Tensor, "images"]]  # the inputs of a head, and the labels


@dataclass(frozen=True)
class Transfer(Check):
    """Measures the paired change of accuracy on another dataset, with a new head per model (SPOT, Section 6.2.2).

    Only the new head is trained. The features are the inputs of the model's own head, in float32. They are computed
    only once per image. The check trains a linear head on the `training` images without augmentation, and tests it on
    the comparison's images. The heads of both models are trained with AdamW and a learning rate that decays to zero on
    a cosine schedule, on the same images in the same order. If both models have the same number of features, both heads
    start from the same weights. The learning rate and the number of epochs default to the paper's values.

    `training` and `classes` (the number of classes) default to the training images and classes of the comparison's
    `splits`. `per_class` is the number of training images per class, or None for all images. The check trains one head
    for each seed in `seeds`. An image's score is the share of heads that classify it correctly, so the intervals cover
    only the choice of images. The details contain the change for every seed. If a model has two heads, as distilled
    models do, the new head receives the inputs of both. `most_drop` limits how many percentage points of accuracy the
    candidate may lose. With `most_drop=None` the check makes no claim.
    """

    training: ImageSet | None = None
    classes: int | None = None
    per_class: int | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: int = 80
    learning_rate: float = 0.025
    most_drop: float | None = None

    def __post_init__(self):
        super().__post_init__()
        classes = 2 if self.classes is None else self.classes
        least = min(self.epochs, classes - 1, 1 if self.per_class is None else self.per_class)
        if least < 1 or self.learning_rate <= 0 or not self.seeds or min(self.seeds) < 0:
            raise InvalidInput(
                f"Transfer(classes={self.classes}, per_class={self.per_class}, seeds={self.seeds}, "
                f"epochs={self.epochs}, learning_rate={self.learning_rate}): give at least two classes, one image, one "
                "epoch, one seed, and a learning rate above 0."
            )

    def require(self, comparison: Comparison) -> None:
        """Raises InvalidInput if there are no training images."""
        self._data(comparison)

    def _data(self, comparison: Comparison) -> tuple[ImageSet, int]:
        """Returns the training images and the number of their classes."""
        if self.training is not None and self.classes is not None:
            return self.training, self.classes
        if comparison.splits is None:
            raise InvalidInput("the check transfer trains a head on other images: give splits=attnrx.load_data(...).")
        return comparison.splits.train, num_dataset_classes(comparison.splits)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Trains the heads of both models and compares their accuracies.

        Raises:
            InvalidInput: There are too few training images, or a model has no head or returns NaN or infinity.
            DataError: The training images have only one class, or lack a class of the test images.
        """
        all_images, classes = self._data(comparison)
        count = len(all_images) if self.per_class is None else self.per_class * classes
        if count > len(all_images):
            raise InvalidInput(
                f"Transfer(per_class={self.per_class}): {count:,} images of {classes} classes were requested, the "
                f"training split holds {len(all_images):,}; ask for fewer."
            )
        # `take` selects images from each class in turn. The new head has the classes of the dataset, so labels that
        # were mapped to the classes of the model's head are mapped back.
        training = dataset_labels(all_images if self.per_class is None else all_images.take(count))
        before, after = (self._probed(role, training, classes, comparison) for role in ("reference", "candidate"))
        n, seed = before.shape[1], comparison.seed
        # Average over the seeds first, because several heads' results for one image are not independent samples.
        change = mean_change(after.mean(0) - before.mean(0), seed)
        details = {
            "seeds": list(self.seeds),
            "by_seed": (100 * (after - before).mean(1)).tolist(),
            "training_images": len(training),
            "training": all_images.fingerprint,
            "interval": "paired bootstrap over images",
        }
        return (
            self._accuracy("reference", before, seed),
            self._accuracy("candidate", after, seed),
            self.change_of_accuracy(" of a fresh head", change, self.most_drop, n, seed=seed, details=details),
        )

    def _probed(
        self, role: str, training: ImageSet, classes: int, comparison: Comparison
    ) -> Float[Tensor, "seeds images"]:
        """Trains a head per seed. Returns 1 for each test image that the head classifies correctly, otherwise 0."""
        rows, labels = _features(role, training, comparison)
        test_rows, test_labels = _features(role, dataset_labels(comparison.data), comparison)
        unknown_labels = sorted(set(test_labels.tolist()) - set(labels.tolist()))
        if unknown_labels or len(labels.unique()) < 2:
            raise DataError(
                f"{len(labels.unique())} class(es) are in the training images; the test images have the other label(s) "
                f"{unknown_labels[:5]}. A head learns from two classes or more, and all of the test; use more training "
                "images."
            )
        heads = [self._head(rows, labels, classes, seed) for seed in self.seeds]
        right = torch.stack([(head(test_rows).argmax(-1) == test_labels).double() for head in heads])
        return right.cpu()

    # The caller may have disabled gradients.
    @torch.enable_grad()
    def _head(
        self, rows: Float[Tensor, "images features"], labels: Int[Tensor, "images"], classes: int, seed: int
    ) -> nn.Linear:
        draws, (count, width) = generator(seed), rows.shape
        head = nn.Linear(width, classes, device=rows.device, dtype=rows.dtype)
        bound = width**-0.5  # PyTorch's initialization, but drawn on the CPU, so it is the same on every device
        with torch.no_grad():
            for parameter in head.parameters():
                drawn = torch.rand(parameter.shape, generator=draws, dtype=parameter.dtype)
                parameter.copy_(bound * (2 * drawn - 1))
        optimizer = torch.optim.AdamW(head.parameters(), self.learning_rate)
        steps = self.epochs * -(-count // BATCH_SIZE)  # includes the last, smaller batch
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(self.epochs):
            for batch in torch.randperm(count, generator=draws).to(rows.device).split(BATCH_SIZE):
                optimizer.zero_grad()
                functional.cross_entropy(head(rows[batch]), labels[batch]).backward()
                optimizer.step()
                schedule.step()
        return head.requires_grad_(False)

    def _accuracy(self, role: str, right: Tensor, seed: int) -> Finding:
        share = mean_share(right.mean(0), seed).scaled(100.0)
        details = {"model": role, "by_seed": (100 * right.mean(1)).tolist()}
        claim = f"top-1 accuracy of a fresh head on the {role}"
        return self.finding("accuracy", claim, share, "%", n=right.shape[1], seed=seed, details=details)


def _features(role: str, images: ImageSet, comparison: Comparison) -> Features:
    model = comparison.models[role]
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
    require_labelled(torch.cat(labels))
    features = torch.cat(rows).float()  # heads are trained in float32, even if the model runs in bfloat16
    if not bool(torch.isfinite(features).all()):
        raise InvalidInput(f"the {role} gives features that are NaN or infinite; check its weights and the data.")
    # Loaders may return images in any order, but the heads of all models need the same rows in the same order.
    order = torch.cat(index).argsort(stable=True)
    return features[order], torch.cat(labels)[order]


def head_features(model: nn.Module, heads: Sequence[nn.Module], images: ImageBatch) -> Float[Tensor, "batch features"]:
    """Runs the model and returns the inputs of its heads, concatenated if there are several."""
    with recording_calls(heads, lambda call: (call.module, call.tokens)) as calls:
        model(images)
    inputs = dict(calls)  # by head, because the heads may be called in a different order from `heads`
    return torch.cat([inputs[head] for head in heads], dim=-1)


def dataset_labels(images: ImageSet) -> ImageSet:
    """Returns the images with the dataset's own class numbers instead of the model's class numbers."""
    if not isinstance(images, LoadedImages) or not images.has_labels:
        return images
    return replace(images, numbers=None, problem=None)


def num_dataset_classes(splits: Splits) -> int:
    """Returns the number of classes in the dataset, which may differ from the model's number of classes."""
    train = splits.train
    mapped = train.numbers if isinstance(train, LoadedImages) and train.has_labels else None
    return len(splits.class_names) if mapped is None else len(mapped)
