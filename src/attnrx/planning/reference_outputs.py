"""What the original answers to some images, and how far a candidate's answers are from that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.checks.fidelity import divergence
from attnrx.data import ImageSet, require_labels
from attnrx.errors import DataError
from attnrx.models import evaluating
from attnrx.shapes import Float, Int, Tensor

Pixels = Float[Tensor, "batch channels height width"]


@dataclass(frozen=True)
class Deviation:
    """How far a candidate is from the original, image by image.

    `divergence` is KL(original || candidate) of the answers in nats, `softened` that of answers softened by a high
    temperature, `agrees` whether both name the same class, and `change` +1 where the candidate alone is right, -1
    where it alone is wrong, 0 elsewhere; None for images without labels.
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
    """Images that are kept, batch by batch, and what the original answers to them."""

    batches: tuple[Tensor, ...]
    labels: Int[Tensor, "images"] | None
    logs: Float[Tensor, "images classes"]

    @classmethod
    def of(cls, model: nn.Module, images: ImageSet, batch_size: int) -> "Answers":
        """Computes the original's answers; labels that fit no head are refused, images without labels are not."""
        if images.has_labels:
            require_labels(images)
        weight = next(model.parameters())
        pixels, labels, logs = [], [], []
        with evaluating([model]):
            for batch in images.batches(batch_size, device=weight.device):
                pixels.append(batch.images.to(weight.dtype))
                labels.append(batch.labels.cpu())
                logs.append(log_probabilities(model(pixels[-1])))
        if not pixels:
            raise DataError("a plan was given no image to measure on; give some, e.g. 128 training images.")
        return cls(tuple(pixels), torch.cat(labels) if images.has_labels else None, torch.cat(logs))

    def __len__(self) -> int:
        return len(self.logs)

    def first(self, count: int) -> "Answers":
        """Returns the first batches, of so many images together or a few more."""
        kept, images = [], 0
        for batch in self.batches:
            if images >= count:
                break
            kept.append(batch)
            images += len(batch)
        labels = None if self.labels is None else self.labels[:images]
        return Answers(tuple(kept), labels, self.logs[:images])

    def measure(self, candidate: nn.Module) -> Deviation:
        """Asks a candidate, and compares."""
        with evaluating([candidate]):
            return self.deviation([log_probabilities(candidate(batch)) for batch in self.batches])

    def deviation(self, answered: Sequence[Tensor]) -> Deviation:
        """Compares what was answered batch by batch."""
        other = torch.cat(list(answered))
        before, after = self.logs.argmax(-1), other.argmax(-1)
        change = None
        if self.labels is not None:
            change = (after == self.labels).double() - (before == self.labels).double()
        agrees = (before == after).double()
        return Deviation(divergence(self.logs, other), softened_divergence(self.logs, other), agrees, change)

    def parts(self) -> Iterator[tuple[Pixels, Float[Tensor, "batch classes"]]]:
        """Returns every batch with what the original answered."""
        yield from zip(self.batches, self.logs.split([len(batch) for batch in self.batches]), strict=True)


def softened_divergence(
    base: Float[Tensor, "images classes"], other: Float[Tensor, "images classes"]
) -> Float[Tensor, "images"]:
    """Gives, per image, the limit of T^2 KL(base || other) as both are softened by a temperature T that grows.

    That is half the variance over the classes of the difference of the logits. All classes of an image count, so that
    it varies much less from image to image than the divergence, which a few images decide.
    """
    return (base.double() - other.double()).var(-1, correction=0) / 2


def log_probabilities(logits: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch classes"]:
    """Returns the logarithms of the answers, in float64 on the CPU."""
    return torch.log_softmax(logits.double(), dim=-1).cpu()
