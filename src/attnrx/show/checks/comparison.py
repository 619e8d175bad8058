"""The input of every check: candidate, reference, data, and their cached predictions."""

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from attnrx.change.predictions import Predictions, predict
from attnrx.data import ImageSet, Splits
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Estimate
from attnrx.nouns.prescription import Prescription
from attnrx.support.arguments import BATCH, DEVICE, MODEL, SEED, instance, optional, require_fields
from attnrx.support.errors import DataError, InvalidInput, NonFiniteOutputs
from attnrx.support.shapes import Int, Tensor
from attnrx.vit.outputs import Logits, Multilabel, OutputKind, output_kind_of


@dataclass(frozen=True, eq=False)
class Comparison:
    """A candidate and its reference on one set of images.

    `masked` is the reference with the pruned directions set to zero, `prescription` and `diagnosis` are those the
    candidate was made from, `splits` the data with training images; each is needed by some checks only. For a candidate
    that is an exported file `verify` sets `runtime`, the name of its runtime and precision, and `unchanged`, a file of
    the reference in both, with which a speed is divided into what the runtime gave and what the compression gave. The
    models are on `device`; `seed` seeds all random draws of the checks.
    """

    candidate: nn.Module
    reference: nn.Module
    data: ImageSet
    masked: nn.Module | None = None
    unchanged: nn.Module | None = None
    runtime: str | None = None
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    splits: Splits | None = None
    seed: int = 0
    batch_size: int = 256
    device: torch.device | str = "cpu"
    _cache: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # outputs and labels

    def __post_init__(self):
        if len(self.data) == 0:
            raise DataError("there is no image to compare the models on; give at least one.")
        require_fields(
            self,
            **dict.fromkeys(("candidate", "reference"), MODEL),
            masked=optional(MODEL),
            prescription=optional(instance("a Prescription, e.g. Prescription.load(FILE)", Prescription)),
            diagnosis=optional(instance("a Diagnosis, e.g. Diagnosis.load(FILE)", Diagnosis)),
            seed=SEED,
            batch_size=BATCH,
            device=DEVICE,
        )

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by role."""
        roles = {"reference": self.reference, "candidate": self.candidate}
        return roles if self.masked is None else {**roles, "masked": self.masked}

    @property
    def predictions(self) -> Predictions:
        """The predictions of all models, computed in one pass over the data on first use.

        Raises:
            InvalidInput: The models differ in the number of outputs, or the reference returns NaN or infinity.
            NonFiniteOutputs: The candidate returns NaN or infinity.
            DataError: The labels do not fit the outputs.
        """
        # On first use: a check that needs no outputs, e.g. of the latency, runs no model over the data.
        # By model, because one may have several roles, e.g. a candidate that is the mask.
        roles: dict[nn.Module, str] = {}
        for role, model in self.models.items():
            if model not in self._cache:
                roles.setdefault(model, role)  # the first role, by which errors name the model
        if roles:
            models = {role: model for model, role in roles.items()}
            computed = predict(models, self.data, self.batch_size, device=self.device)
            # Cached as they are: several checks meet a model that returns NaN, which runs once.
            self._cache.update({model: (computed.outputs[role], computed.labels) for model, role in roles.items()})
        outputs, kind = {role: self._cache[model][0] for role, model in self.models.items()}, self.kind
        classes = {role: values.shape[1] for role, values in outputs.items()}
        if len(set(classes.values())) > 1:
            is_classifier = isinstance(kind, Logits)
            what = "distinguish different numbers of classes" if is_classifier else "return different widths"
            raise InvalidInput(f"the models {what} ({classes}); compare models of the same task.")
        predictions = Predictions(outputs, self._cache[self.reference][1], kind)
        _require_valid(predictions, self.data)
        return predictions

    @property
    def kind(self) -> OutputKind:
        """What the models return, by the reference."""
        return output_kind_of(self.reference)

    def require_logits(self, check: str) -> Logits:
        """Returns what the models return; raises InvalidInput for outputs that are no logits of classes."""
        kind = self.kind
        if not isinstance(kind, Logits):
            raise InvalidInput(f"the check {check} needs probabilities of classes; this model returns {kind.returns}.")
        return kind

    def of(self, candidate: nn.Module) -> "Comparison":
        """Returns the comparison of another candidate, whose outputs are not kept beside those of these models."""
        return replace(self, candidate=candidate, masked=None, _cache=dict(self._cache))

    def taking(self, images: int | None) -> "Comparison":
        """Returns the comparison on the first images only; unchanged for None or more images than there are."""
        if images is None or images >= len(self.data):
            return self
        return replace(self, data=self.data.take(images), _cache={})  # the cached outputs are of other images


def _require_valid(predictions: Predictions, data: ImageSet) -> None:
    kind, labels = predictions.kind, predictions.labels
    for role, outputs in predictions.outputs.items():
        bad = int((~outputs.isfinite().all(-1)).sum())
        if bad and role == "candidate":
            raise NonFiniteOutputs(bad, len(outputs))
        if bad:
            raise InvalidInput(
                f"the {role} returns NaN or infinity for {bad} of {len(outputs)} images; "
                "check its weights and the normalization of the data."
            )
        if data.label_problem is not None:
            continue
        if isinstance(kind, Multilabel) and labels.shape != outputs.shape:
            raise DataError(
                f"the labels of the data are {list(labels.shape)}, and the {role} returns {list(outputs.shape)} logits "
                "of labels: give a vector of 0 and 1 per image, one number for each label, or no labels."
            )
        if isinstance(kind, Logits):
            classes = kind.num_classes(outputs.shape[1])
            if int(labels.max()) >= classes:
                raise DataError(
                    f"the data has a label {int(labels.max())}, the {role} distinguishes {classes} classes; "
                    f"verify on the dataset that the model was trained for."
                )


def chance_notes(accuracy: Estimate, labels: Int[Tensor, "images"]) -> list[str]:
    """Returns a warning if the reference's accuracy, in %, is not above that of guessing the most frequent class."""
    guessing = 100 * float(labels.bincount().max()) / len(labels)
    # By the interval, because the accuracy on a few images exceeds guessing by chance.
    if accuracy.low > guessing:
        return []
    measured = f"{accuracy.value:.1f} % [{accuracy.low:.1f}, {accuracy.high:.1f}] of {len(labels)} images"
    return [
        f"LABELS AT CHANCE LEVEL: the reference classifies {measured} as labelled, no more than guessing their most "
        f"frequent class does ({guessing:.1f} %): the labels may not be numbers of the model's classes "
        "(--label-column, --label-map), so differences of accuracy mean little"
    ]
