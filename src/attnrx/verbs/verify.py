"""`verify`: compares a candidate with its reference, and returns the evidence."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from attnrx.change.exporting import DYNAMIC, Exported, export
from attnrx.data import ImageData, ImageSet, require_labels
from attnrx.data.model_data import images_for
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence, Finding, judged
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Check, Comparison, possible_checks, require_possible, standard_checks
from attnrx.show.checks.comparison import chance_notes
from attnrx.show.checks.statistics import Estimate
from attnrx.support.arguments import (
    ANY,
    BATCH,
    DEVICE,
    FLAG,
    MODEL,
    SEED,
    checked,
    instance,
    optional,
)
from attnrx.support.errors import InvalidInput, NonFiniteOutputs, NotSupported
from attnrx.support.optional import installed_versions
from attnrx.vit.models import (
    described_tokens,
    model_fingerprint,
    require_ordinary_weights,
)
from attnrx.vit.models.verbs import verb
from attnrx.vit.outputs import Logits

PRESCRIPTION = optional(instance("a Prescription, e.g. Prescription.load(FILE)", Prescription))
DIAGNOSIS = instance("a Diagnosis, e.g. Diagnosis.load(FILE)", Diagnosis)


@checked(
    candidate=MODEL,
    reference=MODEL,
    data=ANY,
    checks=optional(instance("checks, e.g. [attnrx.checks.Accuracy(most_drop=0.5)]", Iterable, Check, type)),
    about=optional(instance("a dictionary", Mapping)),
    masked=optional(MODEL),
    prescription=PRESCRIPTION,
    diagnosis=optional(DIAGNOSIS),
    seed=SEED,
    batch_size=BATCH,
    device=DEVICE,
    together=FLAG,
)
@verb
def verify(
    candidate: nn.Module,
    reference: nn.Module,
    data: ImageData,
    checks: Sequence[Check] | None = None,
    about: Mapping[str, Any] | None = None,
    **context: Any,
) -> Evidence:
    """Compares the candidate with the reference by the standard checks, or by `checks`, and returns the evidence.

    `data` are images with labels, in any form that `data.image_set` reads. Without labels the standard checks that need
    them are skipped and listed in the notes of the evidence.

    `context` holds fields of `Comparison` that some checks need: `masked` (the reference with the pruned directions set
    to zero), `prescription`, `diagnosis`, `seed`, `batch_size`. `about` is added to the record.
    """
    # Before any measurement, which may take long.
    for model in (candidate, reference):
        require_ordinary_weights(model)
    context.setdefault("device", next(reference.parameters()).device)
    # In place of the TypeError of the constructor, which names neither `verify` nor the fields.
    unknown = sorted(context.keys() - {field.name for field in fields(Comparison) if not field.name.startswith("_")})
    if unknown:
        raise InvalidInput(
            f"verify has no argument {', '.join(unknown)}; the context arguments are the fields of Comparison: "
            f"{Comparison.__doc__}"
        )
    images = images_for(reference, data, seed=context["seed"] if isinstance(context.get("seed"), int) else 0)
    comparison = Comparison(candidate, reference, images, **context)
    candidate_fingerprint, reference_fingerprint = model_fingerprint(candidate), model_fingerprint(reference)
    # Its rules are recorded in the evidence.
    if comparison.prescription is not None:
        comparison.prescription.require(reference_fingerprint)
    chosen = tuple(standard_checks()) if checks is None else _required_checks(checks)
    notes = list(images.notes)
    if checks is None:
        # The standard checks are those that apply; a check that was requested raises where it cannot run.
        chosen, skipped = possible_checks(chosen, comparison)
        notes += skipped
    require_possible(chosen, comparison)
    if any(check.needs_labels for check in chosen):
        require_labels(images)
    with ExitStack() as files:
        if isinstance(candidate, Exported) and any(check.measures_speed for check in chosen):
            comparison = replace(comparison, **_in_runtime(candidate, reference, images, files, notes))
        # One comparison for all checks: the outputs of the models are computed once.
        findings = _findings(chosen, comparison, notes)
    facts = {
        "candidate": candidate_fingerprint,
        "reference": reference_fingerprint,
        "nothing_removed": reference_fingerprint in (candidate_fingerprint, _exported_fingerprint(candidate)),
        "data": images.fingerprint,
        "images": len(images),
        "outputs": comparison.kind.name,
        "seed": comparison.seed,
        "batch_size": comparison.batch_size,
        "checks": [check.describe() for check in chosen],
        "rules": None if comparison.prescription is None else dict(comparison.prescription.rules),
        "tokens": described_tokens(candidate),
        "versions": installed_versions("attnrx", "torch"),
        "threads": torch.get_num_threads(),
        "notes": [*notes, *([comparison.kind.note] if comparison.kind.note else [])],
        "warnings": _chance_notes(findings, comparison),
        **dict(about or {}),  # last: it may replace any of these
    }
    return Evidence(findings, facts)


def _findings(checks: Sequence[Check], comparison: Comparison, notes: list[str]) -> tuple[Finding, ...]:
    """Runs the checks; where the candidate returns NaN or infinity, that is a finding, and a note lists the checks that
    cannot run.
    """
    findings: list[Finding] = []
    failed, problem = [], None
    for check in checks:
        try:
            findings += check(comparison)
        except NonFiniteOutputs as error:
            failed.append(check.name)
            problem = error
    if problem is None:
        return tuple(findings)
    notes.append(f"not checked: {', '.join(failed)}: {problem}")
    claim = "the candidate returns NaN or infinity for no image"
    fields = judged(float(problem.count), 0.0, n=problem.images, at_least=False)
    details = {"quantity": "non-finite outputs"}
    return (Finding("outputs", claim, float(problem.count), "images", **fields, details=details), *findings)


def _exported_fingerprint(candidate: nn.Module) -> str | None:
    """Returns the fingerprint of the model that a file was written from; None for another candidate."""
    return candidate.facts.get("model", {}).get("fingerprint") if isinstance(candidate, Exported) else None


def _in_runtime(
    candidate: Exported, reference: nn.Module, images: ImageSet, files: ExitStack, notes: list[str]
) -> dict[str, Any]:
    """Returns `unchanged` and `runtime` of a comparison with a file; adds a note where the reference has no such file.

    The file of the reference exists until `files` is closed.
    """
    form, runtime = candidate.form, candidate.form.runtime_at(candidate.images.precision)
    folder, batch = Path(files.enter_context(TemporaryDirectory())), candidate.images.batch
    calibration = images.take(min(form.wanted, len(images)))
    try:
        unchanged = export(
            reference,
            folder / f"unchanged{form.suffix}",
            to=form,
            batch=DYNAMIC if batch is None else batch,
            precision=candidate.images.precision,
            calibration=calibration,
        )
    except NotSupported as error:
        notes.append(f"the unchanged model has no file as {form.name}, so the speed is not divided: {error}")
        return {"runtime": runtime}
    return {"runtime": runtime, "unchanged": unchanged}


def _required_checks(checks: Any) -> tuple[Check, ...]:
    if isinstance(checks, str) or not isinstance(checks, Iterable):
        checks = (checks,)
    checks = tuple(checks)
    wrong = [check for check in checks if not isinstance(check, Check)]
    if wrong:
        raise InvalidInput(
            f"verify was given the check {wrong[0]!r:.80}: give instances with their knobs, e.g. "
            "checks=[attnrx.checks.Accuracy(most_drop=0.5)]."
        )
    if not checks:
        raise InvalidInput("verify was given no check; omit `checks` to run the standard ones.")
    return checks


def _chance_notes(findings: Sequence[Finding], comparison: Comparison) -> list[str]:
    # Labels of another order of classes give no error, only an accuracy near chance. Those of nearest neighbours are
    # labels of the data.
    if not isinstance(comparison.kind, Logits):
        return []
    expected = {"quantity": "accuracy", "model": "reference"}
    accuracies = [
        finding for finding in findings if finding.check == "accuracy" and expected.items() <= finding.details.items()
    ]
    if not accuracies or accuracies[0].low is None or accuracies[0].high is None:
        return []
    return chance_notes(
        Estimate(accuracies[0].value, accuracies[0].low, accuracies[0].high), comparison.predictions.labels
    )
