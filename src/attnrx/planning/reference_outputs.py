"""Cached outputs of the original on some images, and the deviation of a candidate's outputs from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.checks.fidelity import divergence
from attnrx.data import ImageSet, require_labels
from attnrx.errors import DataError
from attnrx.models import evaluating
from attnrx.progress import track
from attnrx.shapes import Float, Int, Tensor

Pixels = Float[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class Deviation:
    """The deviation of a candidate from the original, per image.

    `divergence` is KL(original || candidate) of the predicted probabilities in nats, `softened` its limit for a high
    temperature (`softened_divergence`), `agrees` 1 for the same predicted class, and `change` +1 if only the candidate
    is correct, -1 if only the original is, else 0; None for images without labels.
    """

    divergence: Float[Tensor, "images"]
    softened: Float[Tensor, "images"]
    agrees: Float[Tensor, "images"]
    change: Float[Tensor, "images"] | None

    @property
    def mean(self) -> float:
        """The mean divergence."""
        return float(self.divergence.mean())


@dataclass(frozen=True, eq=False)
class Answers:
    """Batches of images in memory, and the original's log-probabilities for them."""

    batches: tuple[Tensor, ...]
    labels: Int[Tensor, "images"] | None
    logs: Float[Tensor, "images classes"]

    @classmethod
    def of(cls, model: nn.Module, images: ImageSet, batch_size: int) -> "Answers":
        """Computes the original's outputs; raises for labels that fit no head, but accepts images without labels."""
        if images.has_labels:
            require_labels(images)
        weight = next(model.parameters())
        pixels, labels, logs = [], [], []
        with evaluating([model]):
            batches = images.batches(batch_size, device=weight.device)
            for batch in track(batches, "outputs of the original", -(-len(images) // batch_size)):
                pixels.append(batch.images.to(weight.dtype))
                labels.append(batch.labels.cpu())
                logs.append(log_probabilities(model(pixels[-1])))
        if not pixels:
            raise DataError("a plan was given no image to measure on; give some, e.g. 128 training images.")
        return cls(tuple(pixels), torch.cat(labels) if images.has_labels else None, torch.cat(logs))

    def __len__(self) -> int:
        return len(self.logs)

    def first(self, count: int) -> "Answers":
        """Returns the first batches with at least `count` images in total."""
        batches, images = [], 0
        for batch in self.batches:
            if images >= count:
                break
            batches.append(batch)
            images += len(batch)
        labels = None if self.labels is None else self.labels[:images]
        return Answers(tuple(batches), labels, self.logs[:images])

    def measure(self, candidate: nn.Module) -> Deviation:
        """Runs a candidate on the images and returns its deviation."""
        with evaluating([candidate]):
            return self.deviation([log_probabilities(candidate(batch)) for batch in self.batches])

    def deviation(self, answered: Sequence[Tensor]) -> Deviation:
        """Returns the deviation of log-probabilities, given per batch."""
        other = torch.cat(list(answered))
        before, after = self.logs.argmax(-1), other.argmax(-1)
        change = None
        if self.labels is not None:
            change = (after == self.labels).double() - (before == self.labels).double()
        agrees = (before == after).double()
        return Deviation(divergence(self.logs, other), softened_divergence(self.logs, other), agrees, change)

    def parts(self) -> Iterator[tuple[Pixels, Float[Tensor, "batch classes"]]]:
        """Yields every batch with the original's log-probabilities."""
        yield from zip(self.batches, self.logs.split([len(batch) for batch in self.batches]), strict=True)


def softened_divergence(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images"]:
    """Returns the limit of T^2 KL(base || other) per image for softmax temperature T to infinity.

    It is half the variance over the classes of the difference of the logits. All classes contribute, so that it varies
    much less between images than the divergence, which few images dominate.
    """
    return (base.double() - other.double()).var(-1, correction=0) / 2


def log_probabilities(logits: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch classes"]:
    """Returns the log-probabilities in float64 on the CPU."""
    return torch.log_softmax(logits.double(), dim=-1).cpu()
