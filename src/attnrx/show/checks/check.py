"""The base class of checks, and the comparison that they receive: candidate, reference, images and predictions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.change.predictions import Predictions, predict
from attnrx.data import ImageSet, Splits
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Finding, against_limit, estimate_against_limit
from attnrx.nouns.prescription import Prescription
from attnrx.support.arguments import COUNT, NOT_NEGATIVE, Kind, optional, require_fields
from attnrx.support.errors import DataError, InvalidInput, NonFiniteOutputs
from attnrx.support.estimate import Estimate
from attnrx.support.records import to_dict
from attnrx.support.registry import text_name
from attnrx.support.shapes import Int, Tensor
from attnrx.vit.models import FAMILIES, own_model
from attnrx.vit.outputs import Embeddings, Logits, Multilabel, OutputKind, output_kind_of

# The outputs and labels of every model that has run. `_kept` holds one such mapping per fingerprint of images.
_Outputs = dict[nn.Module, tuple[Tensor, Tensor]]
_kept: ContextVar[dict[str, _Outputs] | None] = ContextVar("outputs", default=None)


@contextmanager
def keeping_outputs() -> Iterator[None]:
    """Caches model outputs within the context, so every model runs once per image set. The models must not change."""
    outer = _kept.get()
    token = _kept.set({} if outer is None else outer)
    try:
        yield
    finally:
        _kept.reset(token)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A candidate and its reference on one set of images.

    Some checks need further inputs. `masked` is the reference with the pruned directions set to zero. `prescription`
    and `diagnosis` are the documents that the candidate was made from. `splits` holds the training images in addition
    to the test images.

    If the candidate is an exported file, `verify` sets `runtime` and `unchanged`. `runtime` names the file's runtime
    and precision. `unchanged` is the reference, exported for the same runtime and precision. If both files are timed,
    the checks can tell how much of the speed-up is due to the runtime, and how much to the compression.

    All models are on `device`. The checks derive all their random numbers from `seed`.
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
    _cache: _Outputs = field(default_factory=dict, repr=False)  # the outputs and labels of models that have run

    def __post_init__(self):
        if len(self.data) == 0:
            raise DataError("there is no image to compare the models on; give at least one.")
        if (kept := _kept.get()) is not None and not self._cache:
            object.__setattr__(self, "_cache", kept.setdefault(self.data.fingerprint, {}))
        require_fields(self)

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models by role: "reference", "candidate" and, if there is one, "masked"."""
        roles = {"reference": self.reference, "candidate": self.candidate}
        return roles if self.masked is None else {**roles, "masked": self.masked}

    @property
    def predictions(self) -> Predictions:
        """The predictions of all models, computed in one pass over the data on first use.

        Raises:
            InvalidInput: The models differ in the number of outputs, or the reference returns NaN or infinity.
            NonFiniteOutputs: The candidate returns NaN or infinity.
            DataError: A label is not a class of the models, or a label vector has the wrong length.
        """
        predictions = self.outputs
        classes = {role: values.shape[1] for role, values in predictions.outputs.items()}
        if len(set(classes.values())) > 1:
            is_classifier = isinstance(self.kind, Logits)
            what = "distinguish different numbers of classes" if is_classifier else "return different widths"
            raise InvalidInput(f"the models {what} ({classes}); compare models of the same task.")
        _require_valid(predictions, self.data)
        return predictions

    @property
    def outputs(self) -> Predictions:
        """The predictions of all models, even if they contain NaN or differ in width."""
        # Outputs are computed on first use, because checks such as `Latency` do not need them. They are stored per
        # model, because one model may have several roles. For example, the candidate may be the masked model.
        roles: dict[nn.Module, str] = {}
        for role, model in self.models.items():
            if model not in self._cache:
                roles.setdefault(model, role)  # errors name the model by its first role
        if roles:
            # attnrx works on a copy of a user's model. If both have equal weights, the user's own code runs here.
            models = {role: own_model(model) for model, role in roles.items()}
            computed = predict(models, self.data, self.batch_size, device=self.device)
            # Outputs are cached even if they are not finite, so a model that returns NaN also runs only once.
            self._cache.update({model: (computed.outputs[role], computed.labels) for model, role in roles.items()})
        outputs = {role: self._cache[model][0] for role, model in self.models.items()}
        return Predictions(outputs, self._cache[self.reference][1], self.kind)

    @property
    def kind(self) -> OutputKind:
        """The kind of output, e.g. logits or embeddings, that the reference and all other models return."""
        return output_kind_of(self.reference)

    def require_logits(self, check: str) -> Logits:
        """Returns the kind of the outputs, or raises InvalidInput if they are not class logits."""
        kind = self.kind
        if not isinstance(kind, Logits):
            raise InvalidInput(f"the check {check} needs probabilities of classes; this model returns {kind.returns}.")
        return kind

    def of(self, candidate: nn.Module) -> "Comparison":
        """Returns a copy of this comparison with another candidate. This comparison's cache does not change."""
        return replace(self, candidate=candidate, masked=None, _cache=dict(self._cache))

    def taking(self, images: int | None) -> "Comparison":
        """Returns the comparison on the first `images` images, or on all images if `images` is None or too large."""
        if images is None or images >= len(self.data):
            return self
        return replace(self, data=self.data.take(images), _cache={})  # the cached outputs belong to other images


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
    """Returns a warning if the reference's accuracy (in %) does not exceed the share of the most frequent class."""
    guessing = 100 * float(labels.bincount().max()) / len(labels)
    # The lower end of the interval is compared, because on a few images any model may exceed guessing by luck.
    if accuracy.low > guessing:
        return []
    measured = f"{accuracy.value:.1f} % [{accuracy.low:.1f}, {accuracy.high:.1f}] of {len(labels)} images"
    return [
        f"LABELS AT CHANCE LEVEL: the reference classifies {measured} as labelled, no more than guessing their most "
        f"frequent class does ({guessing:.1f} %): the labels may not be numbers of the model's classes "
        "(--label-column, --label-map), so differences of accuracy mean little"
    ]


class Check(ABC):
    """The base class of checks. Every check is a final frozen dataclass with its settings (knobs) as fields.

    A check returns findings. The claim of a finding is a text without measured numbers, so you can find the same claim
    in several runs and compare its values. The finding's `details["quantity"]` is a short name of what was measured.
    """

    name: ClassVar[str]
    """The check's name in texts and findings. By default, it is the class name in snake case."""

    needs: ClassVar[tuple[str, ...]] = ()
    """What the check requires of images, outputs and models, e.g. "labels" (see `unmet_needs`)."""

    measures_speed: ClassVar[bool] = False
    """Whether the check times the models. For an exported file, such a check also needs the unchanged model's file."""

    kinds: ClassVar[Mapping[str, Kind]] = {}
    """The allowed values of settings whose type annotations are not precise enough."""

    def __init_subclass__(cls):
        cls.name = text_name(cls)

    def __post_init__(self):
        # Settings must be finite, because evidence is stored as JSON, which has no infinity.
        by_type = {int: COUNT, float: NOT_NEGATIVE, int | None: optional(COUNT), float | None: optional(NOT_NEGATIVE)}
        require_fields(self, by_type, **self.kinds)

    def require(self, comparison: Comparison) -> None:  # noqa: B027  (most checks need nothing else)
        """Raises InvalidInput if the comparison lacks an input of the check, e.g. a prescription or training images."""

    @abstractmethod
    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Compares the candidate with the reference, and returns the findings."""

    def finding(
        self,
        quantity: str,
        claim: str,
        measured: Estimate | float,
        unit: str = "",
        *,
        n: int | None = None,
        limit: float | None = None,
        side: str = ">=",
        seed: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Finding:
        """Returns a measured quantity as a finding of this check.

        Args:
            quantity: A short name of what was measured, stored in `details`.
            claim: A text that says what is measured or claimed. It contains no measured number.
            measured: The measured value with its interval, or an exact number.
            unit: The unit of the value and of the limit.
            n: The number of samples, e.g. images.
            limit: The limit that the claim sets. If it is None, the quantity is only reported.
            side: The side of the limit on which the quantity must be: ">=", ">" or "<=".
            seed: The seed of the resamples that the interval is computed from.
            details: Other values to store with the finding.

        Returns:
            The finding. The limit and the interval decide its outcome (`nouns.evidence.against_limit`).
        """
        at_least, strict = side != "<=", side == ">"
        if isinstance(measured, Estimate):
            assert n is not None  # every interval is computed from n samples
            judgement = estimate_against_limit(measured, n, limit, at_least=at_least, strict=strict)
        else:
            judgement = {"value": measured, **against_limit(measured, limit, n=n, at_least=at_least, strict=strict)}
        facts = {"quantity": quantity, **(details or {})}
        return Finding(self.name, claim, unit=unit, **judgement, seed=seed, details=facts)

    def change_of_accuracy(
        self,
        where: str,
        change: Estimate,
        most_drop: float | None,
        n: int,
        *,
        measure: str = Logits.accuracy,
        quantity: str = "accuracy change",
        **more: Any,
    ) -> Finding:
        """Returns a finding on the change of accuracy. If `most_drop` is None, the change is only reported.

        Args:
            where: A text to append to the claim, e.g. " over all corruptions".
            change: The change as a share of the images, candidate minus reference.
            most_drop: The largest allowed loss of accuracy, in percentage points.
            n: The number of images.
            measure: The name of the accuracy measure, by default top-1 accuracy.
            quantity: The short name of the quantity.
            **more: Other arguments of `finding`, i.e. the seed and the details.

        Returns:
            The finding, in percentage points.
        """
        noun = "accuracy" if measure == Logits.accuracy else measure
        # The claim contains no measured number, so that its text is the same in every run.
        claim, limit = f"change of {noun}{where}, candidate minus reference", None
        if most_drop is not None:
            claim, limit = f"the candidate loses at most {most_drop:g} points of {noun}{where}", -most_drop
        return self.finding(quantity, claim, change.scaled(100.0), "points", n=n, limit=limit, **more)

    def describe(self) -> dict[str, Any]:
        """Returns the check's name and settings for a record. Models and functions among the settings are omitted."""
        knobs = {name: _plain(knob) for name, knob in vars(self).items()}
        return {"check": self.name, **{name: knob for name, knob in knobs.items() if knob is not None}}


def unmet_needs(comparison: Comparison) -> dict[str, str]:
    """Returns the requirements that these images, outputs and models do not meet, with a reason for each requirement.

    A check may name these requirements in `needs`:

    - "labels": The images have labels, and the labels are class indices of the model.
    - "logits": The outputs are class logits, rather than e.g. embeddings.
    - "decisions": The outputs imply decisions, e.g. a predicted class. The outputs of a regression do not.
    - "embeddings": The outputs are embeddings, among which nearest neighbours can be searched.
    - "layers": attnrx finds the layers of both models. It finds none in an exported file.
    """
    images, kind = comparison.data, comparison.kind
    models = (comparison.candidate, comparison.reference)
    have_layers = all(any(family.matches(model) for family in FAMILIES.loaded) for model in models)
    returns = f"this model returns {kind.returns}."
    reasons = {
        "labels": None if images.label_problem is None else str(images.label_problem),
        "logits": None if isinstance(kind, Logits) else f"it needs probabilities of classes; {returns}",
        "decisions": None if kind.has_decisions else f"it compares decisions; {returns}",
        "embeddings": None if isinstance(kind, Embeddings) else f"it needs embeddings; {returns}",
        "layers": None if have_layers else "it needs layers; one of the models, e.g. an exported file, has none.",
    }
    return {need: reason for need, reason in reasons.items() if reason is not None}


def require_possible(checks: Sequence[Check], comparison: Comparison) -> None:
    """Raises InvalidInput if one of the checks cannot run with these images, outputs and models."""
    unmet = unmet_needs(comparison)
    for check in checks:
        check.require(comparison)
        for need, reason in unmet.items():
            # Missing labels are reported by `require_labels`, as a DataError that says what to do.
            if need in check.needs and need != "labels":
                raise InvalidInput(f"the check {check.name} {reason.removeprefix('it ')}")


def possible_checks(checks: Sequence[Check], comparison: Comparison) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Returns the checks that can run with the images, outputs and models, and notes on why the others are skipped."""
    notes = []
    # Every skipped check is named in one note only, even if it lacks both labels and logits.
    for need, reason in unmet_needs(comparison).items():
        names = ", ".join(check.name for check in checks if need in check.needs)
        if names:
            notes.append(f"not checked: {names}: {reason}")
            checks = [check for check in checks if need not in check.needs]
    return tuple(checks), tuple(notes)


def _plain(knob: Any) -> Any:
    if isinstance(knob, ImageSet):
        return knob.fingerprint
    if is_dataclass(knob):
        return to_dict(knob)
    if isinstance(knob, tuple):
        return list(knob)  # JSON has no tuples
    # A record cannot store modules, functions and tensors.
    return knob if isinstance(knob, bool | int | float | str) else None
