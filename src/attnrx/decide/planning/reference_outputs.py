"""Cached outputs of the original on some images, and the deviation of a candidate's outputs from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.change.predictions import Predictions, outputs_of, stored
from attnrx.data import ImageSet, require_labelled, require_labels
from attnrx.data.images import UNLABELLED
from attnrx.support.errors import DataError
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.models import evaluating
from attnrx.vit.outputs import Embeddings, OutputKind, output_kind_of


@dataclass(frozen=True)
class Deviation:
    """The deviation of a candidate from the original, per image.

    `divergence` is KL(original || candidate) of the predicted probabilities in nats, `softened` its limit for a high
    temperature, `agrees` 1 for the same predicted class, and `change` +1 if only the candidate is correct, -1 if only
    the original is, else 0; None for images without labels. Those of other outputs are in `attnrx.vit.outputs`; both
    are None for a regression, which makes no decision.
    """

    divergence: Float[Tensor, "images"]
    softened: Float[Tensor, "images"]
    agrees: Float[Tensor, "images"] | None
    change: Float[Tensor, "images"] | None

    @property
    def mean(self) -> float:
        """The mean divergence."""
        return float(self.divergence.mean())


@dataclass(frozen=True, eq=False)
class Answers:
    """Batches of images in memory, and the original's outputs for them."""

    batches: tuple[Tensor, ...]
    labels: Int[Tensor, "images *labels"] | None
    outputs: Float[Tensor, "images classes"]
    kind: OutputKind

    @classmethod
    def of(cls, model: nn.Module, images: ImageSet, batch_size: int) -> "Answers":
        """Computes the original's outputs; images may have no labels.

        Raises:
            DataError: There are no images, a label fits no head, or an embedding is zero.
        """
        weight, kind = next(model.parameters()), output_kind_of(model)
        has_labels = images.has_labels and kind.has_decisions
        if has_labels:
            require_labels(images)
        # Batches are in memory on the model's device and in its precision, because every candidate is measured on them
        # again.
        pixels, labels, outputs = [], [], []
        with evaluating([model]):
            batches = images.batches(batch_size, device=weight.device)
            for batch in track(batches, "outputs of the original", -(-len(images) // batch_size)):
                pixels.append(batch.images.to(weight.dtype))
                labels.append(batch.labels.cpu())
                outputs.append(stored(outputs_of(model, pixels[-1])))
        if not pixels:
            raise DataError("a plan was given no image to measure on; give some, e.g. 128 training images.")
        numbers = torch.cat(labels) if has_labels else None
        if numbers is not None:
            require_labelled(numbers)
        answers = torch.cat(outputs)
        # Embeddings are compared by their directions, and a plan for outputs without any would be arbitrary.
        if isinstance(kind, Embeddings) and not bool((answers.abs().amax(-1) > 0).all()):
            raise DataError(
                "the model returns an embedding of zeros for an image of the plan, whose direction is undefined: give "
                "images of its task, or check the weights of its projection."
            )
        return cls(tuple(pixels), numbers, answers, kind)

    def __len__(self) -> int:
        return len(self.outputs)

    def first(self, count: int) -> "Answers":
        """Returns the first batches with at least `count` images in total."""
        # Whole batches, so that no outputs have to be computed again.
        return self._of(self.batches[: -(-count // len(self.batches[0]))])

    def exactly(self, count: int) -> "Answers":
        """Returns the first `count` images, of the last batch a part."""
        some = self.first(count)
        *whole, last = some.batches
        return self._of((*whole, last[: len(last) - max(len(some) - count, 0)]))

    def _of(self, batches: tuple[Tensor, ...]) -> "Answers":
        images = sum(map(len, batches))
        labels = None if self.labels is None else self.labels[:images]
        return Answers(batches, labels, self.outputs[:images], self.kind)

    def measure(self, candidate: nn.Module) -> Deviation:
        """Runs a candidate on the images and returns its deviation."""
        return self.deviation(self.outputs_of(candidate))

    def outputs_of(self, candidate: nn.Module, start: int = 0) -> list[Tensor]:
        """Runs a candidate on the images from a batch on, and returns its outputs per batch."""
        with evaluating([candidate]):
            return [stored(outputs_of(candidate, batch)) for batch in self.batches[start:]]

    def deviation(self, answered: Sequence[Tensor]) -> Deviation:
        """Returns the deviation of outputs, given per batch in the shape of those of the original."""
        base, other, kind = self.outputs, torch.cat(list(answered)), self.kind
        labels = torch.full((len(base),), UNLABELLED) if self.labels is None else self.labels
        both, agrees, change = Predictions({"original": base, "candidate": other}, labels, kind), None, None
        if kind.has_decisions:
            agrees = both.agreement("original", "candidate")
            change = None if self.labels is None else both.change("original", "candidate")
        return Deviation(both.divergence("original", "candidate"), kind.softened(base, other), agrees, change)
