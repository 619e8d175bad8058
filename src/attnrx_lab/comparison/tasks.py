"""The benchmark's tasks, each of which compares the original model with a compressed model in one application."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.change.predictions import Predictions, predict, stored
from attnrx.data import ImageSet, require_labels
from attnrx.show.checks.outputs import patch_features
from attnrx.show.checks.statistics import mean_estimate, mean_share, paired_change, proportion
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.estimate import Estimate
from attnrx.support.modules import evaluating
from attnrx.support.registry import Registry
from attnrx.vit.models import family_of, known_family
from attnrx.vit.models.boundary.working_copy import library_form, working_copy
from attnrx.vit.models.parts.record import record_of
from attnrx.vit.outputs import Embeddings, output_kind_of, recalled
from attnrx.workflows.load import load

NEIGHBOURS = 10


class Task(ABC):
    """Compares a model with a compressed model on the same images."""

    name: ClassVar[str]

    def prepared(self, model: nn.Module) -> nn.Module:
        """Returns the model in the form that the task needs. The methods then compress the returned model.

        Raises:
            NotSupported: `model` cannot do the task.
        """
        return model

    def require(self, model: nn.Module, images: ImageSet) -> None:  # noqa: B027  (most tasks need nothing else)
        """Raises InvalidInput or DataError if the model or the images do not fit the task."""

    def outputs(self, model: nn.Module, images: ImageSet, batch_size: int) -> Predictions:
        """Returns the model's outputs, stored under the role "model"."""
        return predict({"model": model}, images, batch_size)

    @abstractmethod
    def measures(self, original: Predictions, smaller: Predictions, seed: int) -> dict[str, Estimate]:
        """Returns the measures and their confidence intervals over the images, by the names of their table columns.

        Methods are ranked by the first measure, for which higher values are better.
        """


def _pair(original: Predictions, smaller: Predictions) -> Predictions:
    outputs = {"original": original.outputs["model"], "smaller": smaller.outputs["model"]}
    return Predictions(outputs, original.labels, original.kind)


class Classification(Task):
    """Measures the accuracy, its paired change, the share of unchanged predictions, and the output divergence."""

    name = "classification"

    def require(self, model: nn.Module, images: ImageSet) -> None:
        kind = output_kind_of(model)
        if not kind.has_decisions or isinstance(kind, Embeddings):
            raise InvalidInput(f"the task classification needs a classifier, and this model returns {kind.returns}.")
        require_labels(images)

    def measures(self, original: Predictions, smaller: Predictions, seed: int) -> dict[str, Estimate]:
        pair = _pair(original, smaller)
        before, after = pair.correct("original"), pair.correct("smaller")
        accuracy, divergence = pair.kind.columns
        return {
            f"{accuracy}, %": proportion(int(after.sum()), len(pair)).scaled(100.0),
            "change, points": paired_change(before, after, seed).scaled(100.0),
            "answers kept, %": mean_share(pair.agreement("original", "smaller"), seed).scaled(100.0),
            divergence: mean_estimate(pair.divergence("original", "smaller"), seed),
        }


class ImageRetrieval(Task):
    """Measures the share of each image's nearest neighbours that a compressed encoder still finds.

    The neighbours are other test images. For a timm classifier, the encoder is the model without the classifier layer.
    """

    name = "retrieval"

    def prepared(self, model: nn.Module) -> nn.Module:
        if isinstance(output_kind_of(model), Embeddings):
            return model
        if record_of(model) is None or not hasattr(model, "reset_classifier"):
            raise NotSupported(
                "the task retrieval needs an embedding tower: give a model without a classifier, or one of timm."
            )
        tower: Any = copy.deepcopy(model)
        tower.reset_classifier(0)
        working: Any = working_copy(tower)
        family: Any = family_of(working)
        family.refresh_(working)  # records that there is no classifier, for baselines that create the model again
        return load(library_form(working), outputs="embedding")

    def require(self, model: nn.Module, images: ImageSet) -> None:
        if len(images) < NEIGHBOURS + 2:
            raise InvalidInput(f"the task retrieval needs {NEIGHBOURS + 2} test images, and there are {len(images)}.")

    def measures(self, original: Predictions, smaller: Predictions, seed: int) -> dict[str, Estimate]:
        base, other = original.outputs["model"], smaller.outputs["model"]
        shares = recalled((base, base), (other, other), (NEIGHBOURS,), torch.arange(len(base)))[:, 0]
        measures = {f"recall@{NEIGHBOURS}, %": mean_share(shares, seed).scaled(100.0)}
        if base.shape == other.shape:  # vectors of different widths cannot be compared
            divergence = _pair(original, smaller).divergence("original", "smaller")
            measures["cosine distance"] = mean_estimate(divergence, seed)
        return measures


class DenseFeatures(Task):
    """Compares the final patch features of both models by their cosine similarity and their relative squared error."""

    name = "dense"

    def outputs(self, model: nn.Module, images: ImageSet, batch_size: int) -> Predictions:
        """Returns patch features, [images, patches, features]. Raises NotSupported if attnrx cannot read them."""
        if known_family(model) is None:
            raise NotSupported("it returns no features of the original's patches.")
        device = next(model.parameters()).device
        with evaluating([model]):
            batches = images.batches(batch_size, device=device)
            features = torch.cat([stored(patch_features(model, batch.images).float()) for batch in batches])
        return Predictions({"model": features}, torch.zeros(len(features), dtype=torch.long))

    def measures(self, original: Predictions, smaller: Predictions, seed: int) -> dict[str, Estimate]:
        """Compares the patch features. Raises NotSupported if their shapes differ, e.g. if the width was reduced."""
        base, other = original.outputs["model"], smaller.outputs["model"]
        if base.shape != other.shape:
            raise NotSupported(f"features of {tuple(base.shape[1:])} and {tuple(other.shape[1:])} cannot be compared.")
        # The error of each patch is relative to its own norm. The result is the mean over the patches of an image.
        errors = ((base - other).square().sum(-1) / base.square().sum(-1)).double().mean(1)
        cosines = torch.cosine_similarity(base, other, dim=-1).double().mean(1)
        return {"feature cosine": mean_estimate(cosines, seed), "feature error": mean_estimate(errors, seed)}


class SpeedOnly(Task):
    """Measures only the latency, for which noise images are enough."""

    name = "speed"

    def outputs(self, model: nn.Module, images: ImageSet, batch_size: int) -> Predictions:
        return Predictions({"model": torch.zeros(len(images), 1)}, torch.zeros(len(images), dtype=torch.long))

    def measures(self, original: Predictions, smaller: Predictions, seed: int) -> dict[str, Estimate]:
        return {}


TASKS: Mapping[str, Task] = Registry[Task]("task", Classification(), ImageRetrieval(), DenseFeatures(), SpeedOnly())
