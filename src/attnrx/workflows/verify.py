"""`verify` compares a candidate with its reference, and returns the evidence."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageData, ImageSet, Splits, require_labels
from attnrx.data.model_data import images_for
from attnrx.exporting import DYNAMIC, Exported, export
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence, Finding, against_limit
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Check, Comparison, parse_checks, possible_checks, require_possible, standard_checks
from attnrx.show.checks.check import chance_notes
from attnrx.show.checks.outputs import Metric as MetricCheck
from attnrx.show.checks.outputs import MetricOfSet
from attnrx.support.arguments import checked, instance, optional
from attnrx.support.atomic_writes import scratch_folder
from attnrx.support.errors import InvalidInput, NonFiniteOutputs, NotSupported
from attnrx.support.estimate import Estimate
from attnrx.support.optional import installed_versions
from attnrx.vit.costs.measured import busy_text, is_busy
from attnrx.vit.maps import FITS
from attnrx.vit.models import at_size_of, described_tokens, model_fingerprint, require_ordinary_weights
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import Divergence, Logits, Metric, SetMetric, current_judgement, judged, most_images
from attnrx.workflows.load import SOURCE, load, size_of


def realization_of(prescription: Prescription | None) -> str | None:
    """Returns a few words that say how a prescription was realized, or None if that is unknown."""
    how = {} if prescription is None else prescription.about.get("realized", {})
    if not how:
        return None
    fitted = [word for name, word in zip(FITS, ("repaired", "distilled"), strict=True) if how.get(name)]
    # Fits change the weights, so they are named. Without fits, a compressed model has the same outputs as a masked one.
    by = how["by"]
    return " and ".join(fitted) or ("exact" if by == "compress" else by)


def stored_prescription(
    source: str | Path, fingerprint: str, given: Prescription | None = None
) -> tuple[Prescription | None, tuple[str, ...]]:
    """Returns a candidate's prescription, and notes about it.

    The prescription is read from the candidate's folder. If the folder has none, the result is `given`. If a model was
    pruned in two steps, its folder has the prescription of the second step, which was made for the result of the first
    step. A comparison with the original therefore ignores this prescription and adds a note.

    Raises:
        InvalidInput: The given prescription differs from the candidate's own.
    """
    path = stored_folder(source) / "prescription.json"
    if not path.exists():
        return given, ()
    stored = Prescription.load(path)
    if stored.fingerprint != fingerprint:
        note = (
            f"the prescription in {source} is for the model {stored.fingerprint}, and the reference is {fingerprint}: "
            "it is not used, so there are no comparison with a masked model and no bounds of the pruned directions."
        )
        return given, (note,)
    # Only rules and ranks are compared, because realizing a model writes refitted weights and calibrated thresholds
    # into the tensors of its prescription and policy.
    decided = [
        (replace(each, tokens=None).rules, each.ranks, each.tokens is None) for each in (given or stored, stored)
    ]
    if decided[0] != decided[1]:
        raise InvalidInput(
            f"the prescription {given} is not the one that {source} was made by ({stored}); omit it, or give "
            "the candidate that was made by it."
        )
    return stored, ()


def stored_folder(source: str | Path) -> Path:
    """Returns the folder that contains a model's prescription and evidence.

    For a size of an elastic model (`FOLDER@macs=0.6`), this is the folder of the size. For any other source, the source
    itself is returned.
    """
    found = size_of(source) if "@" in str(source) else None
    return Path(source) if found is None else found[0].folder / found[1].name


CHECK_LIST = instance("checks, e.g. [attnrx.checks.Accuracy(most_drop=0.5)], or their text", str, Iterable, Check, type)


@checked(candidate=SOURCE, reference=SOURCE, checks=optional(CHECK_LIST))
@judged
@verb
def verify(  # noqa: PLR0913  (the inputs of all checks)
    candidate: nn.Module | str | Path,
    reference: nn.Module | str | Path,
    data: ImageData,
    checks: str | Iterable[Check] | None = None,
    about: Mapping[str, Any] | None = None,
    *,
    origin: str | Path | None = None,
    prescription: Prescription | None = None,
    masked: nn.Module | None = None,
    diagnosis: Diagnosis | None = None,
    splits: Splits | None = None,
    seed: int = 0,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    divergence: Divergence | None = None,
    metric: Metric | None = None,
    metric_of_set: SetMetric | None = None,
) -> Evidence:
    """Runs checks that compare the candidate with the reference, and returns the evidence.

    By default, the standard checks run. If your data or models do not allow a standard check, it is skipped, and a note
    in the evidence says why. If a check that you request cannot run, an error is raised.

    Args:
        candidate: A model, or a folder or file that `load` accepts.
        reference: The model that the candidate was made from, or anything that `load` accepts. It runs at the
            candidate's image size.
        data: Images, in any form that `data.image_set` accepts. Checks that compare labels need images with labels.
        checks: Checks, or a text such as "accuracy(most_drop=0.5),fidelity". By default, the standard checks.
        about: Facts to add to the `about` of the evidence.
        origin: The folder that the candidate was loaded from. By default, the path that you passed as the candidate.
            If the folder's prescription is for the reference, `verify` uses it and makes the masked model with it.
        prescription: The prescription that the candidate was made with.
        masked: The reference with the pruned directions set to zero, for checks that compare with it. If the candidate
            comes from a folder, the default is made with the folder's prescription.
        diagnosis: The diagnosis of the reference, for the check "controls".
        splits: Data with training images, which the checks "controls" and "transfer" use for fitting.
        seed: The seed of every random draw.
        batch_size: Images per forward pass.
        device: The device of the models. By default, the reference's device.
        divergence: Your own divergence, `divergence(original, smaller)`. It returns one number per image, 0 for equal
            outputs. Both arguments are the outputs for a batch of images, as the models return them.
        metric: Your own metric, `metric(outputs, (images, labels))`. It returns one number per image, e.g. the
            intersection over union with a mask. For models without classes, labels may be tensors of any shape.
        metric_of_set: Your own metric over all images, `metric_of_set(outputs, labels)`. It returns one number, e.g. a
            mean average precision. Its confidence interval comes from 200 resamples of the images.

    Returns:
        The findings, with the conditions of their measurement.

    Raises:
        InvalidInput: A requested check is meaningless for these images, outputs and models, or the prescription and the
            candidate do not belong together.
        FingerprintMismatch: The prescription is for another reference.
        DataError: There are no images, or a requested check needs labels that are missing.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model, images = rx.load(vit), torch.randn(64, 3, 32, 32)
        >>> prescription = rx.prescribe(rx.diagnose(model, images), "total_rank:0.5")
        >>> small = rx.realize(model, prescription)
        >>> evidence = rx.verify(small, model, torch.randn(64, 3, 32, 32), "costs,fidelity", prescription=prescription)
        >>> [f.claim for f in evidence.findings if f.outcome == "fails"]
        []
    """
    if isinstance(candidate, str | Path):
        origin = candidate if origin is None else origin
    reference = _loaded(reference, device)
    require_weights(reference, "reference")
    device = next(reference.parameters()).device if device is None else device
    candidate = _loaded(candidate, device)
    require_weights(candidate, "candidate")
    reference = at_size_of(reference, candidate)
    # The weights are checked before any measurement, because measurements may take long.
    for model in (candidate, reference):
        require_ordinary_weights(model)
    fingerprint, notes = model_fingerprint(reference), list[str]()
    if prescription is not None:
        prescription.require(fingerprint, "the reference")
    if origin is not None:
        prescription, found = stored_prescription(origin, fingerprint, prescription)
        notes += found
    if masked is None and origin is not None and prescription is not None:
        is_mask = realization_of(prescription) == "mask"
        masked = candidate if is_mask else realize(reference, prescription, by="mask")
    images, most = images_for(reference, data, seed=seed), most_images(reference)
    notes += images.notes
    if len(images) > most:
        notes.append(f"the outputs are large: {most:,} of {len(images):,} images are used")
        images = images.take(most)
    inputs = {"prescription": prescription, "diagnosis": diagnosis, "splits": splits}
    settings = {"seed": seed, "batch_size": batch_size, "device": device}
    comparison = Comparison(candidate, reference, images, masked, **inputs, **settings)
    if checks is None:
        chosen, skipped = possible_checks(standard_checks(), comparison)
        notes += skipped
    else:
        chosen = _instances(checks)
    chosen = (*_of_users(), *chosen)
    require_possible(chosen, comparison)
    if any("labels" in check.needs for check in chosen):
        require_labels(images)
    with scratch_folder() as folder:  # for the reference's file
        if isinstance(candidate, Exported) and any(check.measures_speed for check in chosen):
            comparison = replace(comparison, **_in_runtime(candidate, reference, images, folder, notes))
        # All checks share one comparison, so the outputs of the models are computed only once.
        findings = _findings(chosen, comparison, notes)
    of_candidate = model_fingerprint(candidate)
    # The fingerprint covers only the weights, so the token reduction is compared, too.
    written = candidate.facts.get("model", {}) if isinstance(candidate, Exported) else {}
    states = [(of_candidate, described_tokens(candidate)), (written.get("fingerprint"), written.get("tokens"))]
    facts = {
        "candidate": of_candidate,
        "reference": fingerprint,
        "nothing_removed": (fingerprint, described_tokens(reference)) in states,
        "data": images.fingerprint,
        "images": len(images),
        "outputs": comparison.kind.name,
        **({} if current_judgement().divergence is None else {"divergence": comparison.kind.distance}),
        "seed": comparison.seed,
        "batch_size": comparison.batch_size,
        "checks": [check.describe() for check in chosen],
        "rules": None if prescription is None else dict(prescription.rules),
        "tokens": described_tokens(candidate),
        "versions": installed_versions("attnrx", "torch"),
        "threads": torch.get_num_threads(),
        "notes": [*notes, *([comparison.kind.note] if comparison.kind.note else [])],
        "warnings": [*_chance_notes(findings, comparison), *_busy_notes(findings)],
    }
    if origin is not None:
        removed_share = None if prescription is None else prescription.removed_share
        facts |= {"realization": realization_of(prescription), "removed_share": removed_share}
    return Evidence(findings, {**facts, **dict(about or {})})  # `about` is last, so it may replace any fact


def _of_users() -> tuple[Check, ...]:
    """Returns the checks for the `metric` and the `metric_of_set` of this call, if any."""
    judgement = current_judgement()
    checks: tuple[tuple[Any, Check], ...] = (judgement.metric, MetricCheck()), (judgement.metric_of_set, MetricOfSet())
    return tuple(check for function, check in checks if function is not None)


def require_weights(model: nn.Module, role: str) -> None:
    """Raises InvalidInput for a module without parameters, which is not a model."""
    if next(model.parameters(), None) is None:
        raise InvalidInput(f"verify({role}=...): this {type(model).__name__} has no weights; give a model.")


def _loaded(source: nn.Module | str | Path, device: torch.device | str | None) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    model = load(source)
    return model if device is None else model.to(device)


def _instances(checks: Any) -> tuple[Check, ...]:
    """Returns the checks in a text or an iterable."""
    if isinstance(checks, str):
        return parse_checks(checks)
    found = tuple(checks) if isinstance(checks, Iterable) else (checks,)
    if not found or not all(isinstance(check, Check) for check in found):
        raise InvalidInput(
            f"verify was given the checks {checks!r:.80}: give instances with their knobs, e.g. "
            "checks=[attnrx.checks.Accuracy(most_drop=0.5)], or their text; omit them to run the standard ones."
        )
    return found


def _findings(checks: Sequence[Check], comparison: Comparison, notes: list[str]) -> tuple[Finding, ...]:
    """Runs the checks.

    If the candidate returns NaN or infinity, a finding says so, and a note lists the checks that cannot run.
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
    fields = against_limit(float(problem.count), 0.0, n=problem.images, at_least=False)
    details = {"quantity": "non-finite outputs"}
    return (Finding("outputs", claim, float(problem.count), "images", **fields, details=details), *findings)


def _in_runtime(
    candidate: Exported, reference: nn.Module, images: ImageSet, folder: Path, notes: list[str]
) -> dict[str, Any]:
    """Returns the fields `runtime` and `unchanged` of a `Comparison` whose candidate is a file.

    `unchanged` is a file of the reference in the same format. If the reference cannot be written in this format,
    `unchanged` is missing, and a note says why.
    """
    form, batch = candidate.form, candidate.images.batch
    runtime = form.runtime_at(candidate.images.precision)
    try:
        unchanged = export(
            reference,
            folder / f"unchanged{form.suffix}",
            to=form,
            batch=DYNAMIC if batch is None else batch,
            precision=candidate.images.precision,
            calibration=images,
        )
    except NotSupported as error:
        notes.append(f"the unchanged model has no file as {form.name}, so the speed is not divided: {error}")
        return {"runtime": runtime}
    return {"runtime": runtime, "unchanged": unchanged}


def _busy_notes(findings: Sequence[Finding]) -> list[str]:
    """Returns a warning if a speed was measured while other processes used the machine."""
    taken = [finding.details.get("measured", finding.details).get("taken") for finding in findings]
    busy = max((each for each in taken if is_busy(each)), default=None)
    return [] if busy is None else [f"the speed was {busy_text(busy)}: verify again on an idle machine"]


def _chance_notes(findings: Sequence[Finding], comparison: Comparison) -> list[str]:
    # If the labels and the model number the classes in different orders, no error is raised, but the accuracy is near
    # chance. Embeddings need no such note, because nearest neighbours use the labels of the data themselves.
    of_reference = {"quantity": "accuracy", "model": "reference"}
    for finding in findings if isinstance(comparison.kind, Logits) else ():
        is_accuracy = finding.check == "accuracy" and of_reference.items() <= finding.details.items()
        if is_accuracy and finding.low is not None and finding.high is not None:
            accuracy = Estimate(finding.value, finding.low, finding.high)
            return chance_notes(accuracy, comparison.predictions.labels)
    return []
