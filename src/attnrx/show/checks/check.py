"""The base class of checks, which map a comparison to findings, and their text form."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, ClassVar

from attnrx.data import ImageSet
from attnrx.nouns.evidence import Estimate, Finding, judged
from attnrx.show.checks.comparison import Comparison
from attnrx.support.arguments import COUNT, NOT_NEGATIVE, optional, require_fields
from attnrx.support.dataclass_records import to_dict
from attnrx.support.errors import InvalidInput
from attnrx.support.text_parsing import knobs_of
from attnrx.vit.models import FAMILIES
from attnrx.vit.outputs import Embeddings, Logits


class Check(ABC):
    """One kind of evidence. Every check is a final frozen dataclass whose fields are its knobs.

    The claim of a finding contains no measured number, so that the same claim can be compared over several runs;
    `details["quantity"]` is the short name of the measured quantity.
    """

    name: ClassVar[str]
    on_request: ClassVar[bool] = False
    """Whether the check runs only if it is requested by name: it needs its own input, or takes long."""

    needs: ClassVar[tuple[str, ...]] = ()
    """What the check needs of images, outputs and models: names of `NEEDS`."""

    measures_speed: ClassVar[bool] = False
    """Whether the check times the models; of an exported file then the unchanged model's file is needed too."""

    def __post_init__(self):
        # Counts, and shares and limits. Not infinity: JSON has none, so evidence with it could not be read again.
        kinds = {int: COUNT, float: NOT_NEGATIVE, int | None: optional(COUNT), float | None: optional(NOT_NEGATIVE)}
        knobs = knobs_of(type(self)).values()
        require_fields(self, **{knob.name: kinds[knob.type] for knob in knobs if knob.type in kinds})

    def require(self, comparison: Comparison) -> None:  # noqa: B027  (most checks need nothing else)
        """Raises InvalidInput if the comparison lacks an input of the check, e.g. a prescription or training images."""

    @abstractmethod
    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Measures the candidate against the reference."""

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
            quantity: The short name of the quantity, for `details`.
            claim: What is measured or claimed, without a number.
            measured: The value with its interval, or an exact number.
            unit: The unit of both.
            n: The number of samples, e.g. images.
            limit: The limit of the claim; None for a quantity that is reported.
            side: On which side of the limit the quantity must be: ">=", ">" or "<=".
            seed: The seed of the draws behind the interval.
            details: Further measurements.

        Returns:
            The finding, judged by the limit (`nouns.evidence.judged`).
        """
        at_least, strict = side != "<=", side == ">"
        if isinstance(measured, Estimate):
            assert n is not None  # an interval is over samples
            judgement = measured.judged(n, limit, at_least=at_least, strict=strict)
        else:
            judgement = {"value": measured, **judged(measured, limit, n=n, at_least=at_least, strict=strict)}
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
        seed: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> Finding:
        """Returns the finding for a paired change of accuracy, in points; a claim unless `most_drop` is None.

        Args:
            where: What is appended to the claim, e.g. " over all corruptions".
            change: The change as a share of the images, candidate minus reference.
            most_drop: The limit of the loss in points.
            n: The number of images.
            measure: What is counted as correct.
            quantity: The short name of the quantity.
            seed: The seed of the draws behind the interval.
            details: Further measurements.

        Returns:
            The finding.
        """
        noun = "accuracy" if measure == Logits.accuracy else measure
        # A claim has no measured number in its text, so that runs can be compared claim by claim.
        claim, limit = f"change of {noun}{where}, candidate minus reference", None
        if most_drop is not None:
            claim, limit = f"the candidate loses at most {most_drop:g} points of {noun}{where}", -most_drop
        points = change.scaled(100.0)
        return self.finding(quantity, claim, points, "points", n=n, limit=limit, seed=seed, details=details)

    def describe(self) -> dict[str, Any]:
        """Returns the name and the knobs for the record: image sets as fingerprints, without models and functions."""
        knobs = {name: _plain(knob) for name, knob in vars(self).items()}
        return {"check": self.name, **{name: knob for name, knob in knobs.items() if knob is not None}}


# What a check may need: labels that are class indices of the model; logits of classes, which embeddings have not;
# decisions, which the numbers of a regression do not make; embeddings, as neighbours of class logits are not what such
# a model is used for; layers, which an exported file has not.
NEEDS = ("labels", "logits", "decisions", "embeddings", "layers")


def unmet_needs(comparison: Comparison) -> dict[str, str]:
    """Returns those of `NEEDS` that the images, outputs and models do not meet, each with the reason."""
    images, kind = comparison.data, comparison.kind
    models = (comparison.candidate, comparison.reference)
    have_layers = all(any(family.matches(model) for family in FAMILIES) for model in models)
    returns = f"this model returns {kind.returns}."
    reasons = (
        None if images.label_problem is None else str(images.label_problem),
        None if isinstance(kind, Logits) else f"it needs probabilities of classes; {returns}",
        None if kind.has_decisions else f"it compares decisions; {returns}",
        None if isinstance(kind, Embeddings) else f"it needs embeddings; {returns}",
        None if have_layers else "it needs layers; one of the models, e.g. an exported file, has none.",
    )
    return {need: reason for need, reason in zip(NEEDS, reasons, strict=True) if reason is not None}


def require_possible(checks: Sequence[Check], comparison: Comparison) -> None:
    """Raises InvalidInput for a check that cannot mean anything with these images, outputs and models."""
    unmet = unmet_needs(comparison)
    for check in checks:
        check.require(comparison)
        for need, reason in unmet.items():
            # Missing labels are reported as an error of the data, with what to do (`require_labels`).
            if need in check.needs and need != "labels":
                raise InvalidInput(f"the check {check.name} {reason.removeprefix('it ')}")


def possible_checks(checks: Sequence[Check], comparison: Comparison) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Returns the checks that the images, outputs and models allow, and a note for every reason to skip some."""
    notes = []
    # One note per reason, and a check without labels and logits in the first only.
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
    # Modules, functions and tensors are no settings that a record could repeat.
    return knob if isinstance(knob, bool | int | float | str) else None
