"""What every check sees: the candidate, its reference, the data, and what they answered, computed once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from attnrx import processes
from attnrx.checks.statistics import Estimate
from attnrx.data import ImageSet
from attnrx.diagnosis import Diagnosis
from attnrx.errors import DataError, InvalidInput
from attnrx.models import evaluating
from attnrx.prescription import Prescription
from attnrx.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True)
class Predictions:
    """What several models, named by their role, answered to the same images in the same order."""

    logits: Mapping[str, Float[Tensor, "images classes"]]
    labels: Int[Tensor, "images"]

    def __len__(self) -> int:
        return len(self.labels)

    def correct(self, role: str) -> Bool[Tensor, "images"]:
        """Whether each image was classified as labelled."""
        return self.classes(role) == self.labels

    def classes(self, role: str) -> Int[Tensor, "images"]:
        """The predicted class of each image."""
        return self.logits[role].argmax(-1)


@dataclass
class _Answers:
    """What was answered so far, by model, to the images with these labels."""

    labels: Int[Tensor, "images"] | None = None
    logits: dict[nn.Module, Float[Tensor, "images classes"]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A candidate and its reference on one set of images.

    `masked` is the reference with the prescription realized as zeros, `prescription` and `diagnosis` are those the
    candidate was made from; each is needed by some findings only. The models lie on `device`; `seed` feeds every
    random draw of the checks. With `together` every process that a launcher started makes this same comparison, and
    each answers a part of the images; the findings are those of one process.
    """

    candidate: nn.Module
    reference: nn.Module
    data: ImageSet
    masked: nn.Module | None = None
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    seed: int = 0
    batch_size: int = 256
    device: torch.device | str = "cpu"
    together: bool = False
    _answers: _Answers = field(default_factory=_Answers, repr=False)

    def __post_init__(self):
        if self.batch_size < 1 or self.seed < 0:
            raise InvalidInput(
                f"batch_size={self.batch_size}, seed={self.seed}: give at least one image and a seed of 0 or more."
            )
        if len(self.data) == 0:
            raise DataError("the data to verify on is empty; give at least one labelled image.")

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by role."""
        roles = {"reference": self.reference, "candidate": self.candidate}
        return roles if self.masked is None else {**roles, "masked": self.masked}

    @property
    def predictions(self) -> Predictions:
        """The answers of all models, from one pass over the data that is made on first use."""
        answers = self._answers
        missing = {role: model for role, model in self.models.items() if model not in answers.logits}
        if missing or answers.labels is None:
            found = predict(missing, self)
            answers.logits.update({model: found.logits[role] for role, model in missing.items()})
            answers.labels = found.labels
        classes = {role: answers.logits[model].shape[1] for role, model in self.models.items()}
        if len(set(classes.values())) > 1:
            raise InvalidInput(
                f"the models distinguish different numbers of classes ({classes}); compare models of the same task."
            )
        return Predictions({role: answers.logits[model] for role, model in self.models.items()}, answers.labels)

    @property
    def place(self) -> tuple[int, int]:
        """Which process this is, of how many that compare together."""
        return processes.place() if self.together else (0, 1)

    def with_masked(self, masked: nn.Module | None) -> "Comparison":
        """The same comparison, its answers included, with a masked model; None leaves it as it is."""
        return self if masked is None else replace(self, masked=masked)

    def taking(self, images: int | None) -> "Comparison":
        """The same comparison on the first images only; None, or more than there are, leaves it as it is."""
        if images is None or images >= len(self.data):
            return self
        return replace(self, data=self.data.take(images), _answers=_Answers())


def predict(models: Mapping[str, nn.Module], comparison: Comparison) -> Predictions:
    """Runs the models over the data side by side; logits are kept on the CPU."""
    answers: dict[str, list[Tensor]] = {role: [] for role in models}
    labels = []
    own = comparison.data.part(*comparison.place, comparison.batch_size)
    with evaluating(models.values()):
        for batch in own.batches(comparison.batch_size, device=comparison.device) if len(own) else ():
            labels.append(batch.labels.cpu())
            for role, model in models.items():
                answers[role].append(answer(model, batch.images).cpu())
    whole = processes.all_rows if comparison.together else torch.cat
    predictions = Predictions({role: whole(parts) for role, parts in answers.items()}, whole(labels))
    for role, logits in predictions.logits.items():
        _require_finite(role, logits)
        if own.label_problem is None:
            _require_known(role, logits, predictions.labels)
    return predictions


def answer(model: nn.Module, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
    """Returns the logits of one batch, at the precision of the model's weights."""
    return model(images.to(next(model.parameters()).dtype))


def chance_notes(accuracy: Estimate, labels: Int[Tensor, "images"]) -> list[str]:
    """Returns a warning where a reference's accuracy, in %, may be that of always guessing the most frequent class."""
    guessing = 100 * float(labels.bincount().max()) / len(labels)
    if accuracy.low > guessing:
        return []
    return [
        f"the reference classifies {accuracy.value:.1f} % [{accuracy.low:.1f}, {accuracy.high:.1f}] of {len(labels)} "
        f"images as labelled, no more than guessing their most frequent class does ({guessing:.1f} %): the labels may "
        "not be numbers of the model's classes (--label-column, --label-map), so differences of accuracy mean little."
    ]


def _require_finite(role: str, logits: Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        bad = int((~torch.isfinite(logits).all(-1)).sum())
        raise InvalidInput(
            f"the {role} answers {bad} of {len(logits)} images with NaN or infinity; "
            "check its weights and the normalization of the data."
        )


def _require_known(role: str, logits: Tensor, labels: Tensor) -> None:
    if int(labels.max()) >= logits.shape[1]:
        raise DataError(
            f"the data has a label {int(labels.max())}, the {role} distinguishes {logits.shape[1]} classes; "
            "verify on the dataset that the model was trained for."
        )
