"""Runs models on images and compares their outputs. Checks, plans, fits and comparisons of methods use this module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.data import ImageSet, require_labelled
from attnrx.support.modules import evaluating, rows_of
from attnrx.support.progress import track
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.attention import Observation
from attnrx.vit.models import InputValidation, answer, family_of, observing
from attnrx.vit.outputs import KINDS, OutputKind, output_kind_of

BATCH = 64  # images per batch by default


@dataclass(frozen=True)
class Predictions:
    """The outputs of several models by role, on the same images in the same order.

    `outputs` maps roles such as "original" to model outputs. `labels` holds one label per image, or a negative number
    for an image without a label. `kind` defines how outputs are compared, e.g. as logits or as embeddings.
    """

    outputs: Mapping[str, Float[Tensor, "images classes"]]
    labels: Int[Tensor, "images *labels"]
    kind: OutputKind = KINDS["logits"]

    def __len__(self) -> int:
        return len(self.labels)

    def divergence(self, base: str, other: str) -> Float[Tensor, "images"]:
        """Returns for every image the divergence of the outputs of `other` from the outputs of `base` (see `kind`)."""
        # The divergence is computed on all images together, because its scale may depend on all outputs.
        return self.kind.divergence(self.outputs[base], self.outputs[other])

    def decisions(self, role: str) -> Int[Tensor, "images *labels"]:
        """Returns each image's decision: a class, the predicted labels, or the nearest neighbour of the embedding."""
        return self.kind.decisions(self.outputs[role])

    def agreement(self, base: str, other: str) -> Float[Tensor, "images"]:
        """Returns for every image the share of its decisions on which two models agree."""
        return self.kind.agreement(self.decisions(base), self.decisions(other))

    def correct(self, role: str) -> Bool[Tensor, "images"]:
        """Returns for every image whether the model's decision matches the true label.

        Raises:
            DataError: Some of the images have no label.
        """
        # Only this comparison uses labels, so only this method requires them.
        require_labelled(self.labels)
        return self.kind.correct(self.decisions(role), self.labels)

    def change(self, base: str, other: str) -> Float[Tensor, "images"]:
        """Returns for every image +1 if only `other` is correct, -1 if only `base` is correct, else 0.

        Raises:
            DataError: Some of the images have no label.
        """
        return self.correct(other).double() - self.correct(base).double()


def outputs_of(
    model: nn.Module, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch classes"]:
    """Returns a model's outputs for one batch, one row per image, computed in the dtype of the weights."""
    return rows_of(answer(model, images.to(next(model.parameters()).dtype)))


def stored(outputs: Float[Tensor, "batch classes"]) -> Float[Tensor, "batch classes"]:
    """Returns outputs on the CPU in at least float32, because sums and comparisons in half precision are inexact."""
    return outputs.detach().cpu().to(torch.promote_types(outputs.dtype, torch.float32))


def observe_images(
    model: nn.Module,
    images: ImageSet,
    observe: Callable[[int, Observation], None],
    operation: str,
    task: str,
    batch_size: int = BATCH,
) -> list[str]:
    """Runs a model on images, and calls `observe` with each layer's index and intermediate results.

    Args:
        model: The model. It is in evaluation mode during the call.
        images: Images, normalized for the model. Images on another scale cause a ScaleWarning.
        observe: A function that is called once per layer and batch.
        operation: The name of the public function that errors and warnings mention.
        task: The label of the progress display.
        batch_size: Images per forward pass.

    Returns:
        Notes on the images, e.g. about their scale.

    Raises:
        DataError: The images do not have the model's input shape, or contain NaN or infinity.
    """
    family, device = family_of(model), next(model.parameters()).device
    validation = InputValidation(model, family, operation)
    with evaluating([model]), observing(model, family, observe):
        for batch in track(images.batches(batch_size, device=device), task, -(-len(images) // batch_size)):
            model(validation.take(batch.images))
    return validation.notes()  # also issues the warnings


def predict(
    models: Mapping[str, nn.Module],
    images: ImageSet,
    batch_size: int = BATCH,
    *,
    device: torch.device | str | None = None,
    task: str = "comparing predictions",
) -> Predictions:
    """Runs all models on the same batches and returns their outputs, paired by image.

    The images are read only once, so outputs stay paired even if the data is in another order each time it is read.

    Args:
        models: The models by role. The first model defines how outputs are compared.
        images: Images, normalized for the models.
        batch_size: Images per forward pass.
        device: The device of the models. None means the first model's device.
        task: The label of the progress display.

    Returns:
        The outputs of all models, on the CPU.
    """
    first = next(iter(models.values()))
    device = next(first.parameters()).device if device is None else device
    parts: dict[str, list[Tensor]] = {role: [] for role in models}
    labels: list[Tensor] = []
    with evaluating(models.values()):
        for batch in track(images.batches(batch_size, device=device), task, -(-len(images) // batch_size)):
            labels.append(batch.labels.cpu())
            for role, model in models.items():
                parts[role].append(stored(outputs_of(model, batch.images)))
    outputs = {role: torch.cat(rows) for role, rows in parts.items()}
    return Predictions(outputs, torch.cat(labels), output_kind_of(first))
