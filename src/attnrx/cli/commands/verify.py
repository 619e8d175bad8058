"""attnrx verify: compares a candidate with its reference on images and writes evidence. Exit code 1: a claim fails."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import chosen_images, kind_of, model_argument, splits_argument
from attnrx.cli.options import DRAWS, POINTS, add_backend, add_data, add_running, add_split, add_trust, option
from attnrx.cli.origin import CandidateOrigin, masked_model, origin_of
from attnrx.cli.outcome import Outcome, Table, significant
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "collect evidence of what a candidate costs against its reference"
EXAMPLE = "attnrx verify runs/cifar10-slim --reference runs/cifar10 --data cifar10 --out evidence.json"

CHECKS = (
    "names with knobs in brackets: accuracy,robustness(severities=3,corruptions=fog/snow) or transfer(per_class=50); "
    "promises for a plan (all but controls, promises and transfer)"
)
RANDOM_CONTROLS = 10
CORRUPTED = ("corruption", "reference", "candidate", "change", "95 % interval")


def add(parser: Parser) -> None:
    parser.add_argument("candidate", help="the folder of a realized model, or a file that was exported")
    option(parser, "--reference", "MODEL", "the model it was made from", required=True)
    option(parser, "--weights", "FILE", "the weights of a reference timm:NAME, in a local file")
    add_trust(parser)
    add_data(parser, "the images to compare both models on")
    option(parser, "--out", "FILE", "the evidence, one JSON file (printed only)")
    parser.kind = "attnrx evidence"
    origin = parser.add_argument_group("origin of the candidate")
    option(origin, "--prescription", "FILE", "(the one in the candidate's folder)")
    option(origin, "--diagnosis", "FILE", "needed for controls")
    option(origin, "--masked", "MODEL", "the masked model (realized from the prescription)")
    checks = parser.add_argument_group("checks")
    option(checks, "--checks", "CHECKS", CHECKS)
    option(checks, "--controls", bool, "also compare with rank-matched controls")
    option(checks, "--draws", DRAWS, f"random controls ({RANDOM_CONTROLS})")
    option(checks, "--most-drop", POINTS, "accuracy the candidate may lose (1.0)")
    add_backend(parser)
    add_split(parser, "test")
    add_running(parser, 256)


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.support import process_group  # imports torch

    _, count = process_group.join_process_group()
    requested = _requested(arguments)  # before the models are loaded, so that a typing error is reported at once
    _require_effects(arguments, requested)
    diagnosis = None if arguments.diagnosis is None else rx.Diagnosis.load(arguments.diagnosis)
    candidate = model_argument(arguments.candidate, arguments.device, trust=arguments.trust)
    if arguments.backend is not None:
        rx.use_backend(candidate, arguments.backend)
    reference = model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
    origin = origin_of(candidate, arguments.candidate, reference, arguments.prescription)
    prescription, masked = origin.prescription, _masked(arguments, candidate, reference, origin)
    splits = splits_argument(reference, arguments)
    images = chosen_images(splits, arguments)
    # Functions: inputs are prepared, and missing ones are an error, only for a check that was requested.
    inputs: Mapping[str, Callable[[], dict[str, Any]]] = {
        "accuracy": lambda: {} if arguments.most_drop is None else {"most_drop": arguments.most_drop},
        "controls": lambda: _controls(arguments, reference, origin, diagnosis, splits.train),
        "transfer": lambda: {"training": splits.train, "classes": rx.data.own_classes(splits)},
    }
    kinds: Mapping[str, Any] = rx.checks.all_checks()
    checks = tuple(kinds[one.name](**{**one.knobs, **inputs.get(one.name, dict)()}) for one in requested)
    notes: tuple[str, ...] = ()
    if arguments.checks is None:
        # The default is every check that the data and the model allow; one that was requested raises where it cannot.
        explicit = {"accuracy": arguments.most_drop is not None, "controls": arguments.controls}
        by_default = [check for check in checks if not explicit.get(check.name)]
        comparison = rx.checks.Comparison(candidate, reference, images)
        possible, notes = rx.checks.possible_checks(by_default, comparison)
        checks = tuple(check for check in checks if explicit.get(check.name) or check in possible)
    log(f"verifying {arguments.candidate} on {len(images):,} images: {', '.join(check.name for check in checks)}")
    evidence = rx.verify(
        candidate,
        reference,
        images,
        checks,
        {"realization": kind_of(origin.how), "removed_share": prescription and prescription.removed_share},
        masked=masked,
        prescription=prescription,
        diagnosis=diagnosis,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        together=count > 1,
    )
    evidence = replace(evidence, about={**evidence.about, "notes": [*origin.notes, *notes, *evidence.about["notes"]]})
    if arguments.out is not None:
        # One process writes; the others wait for it.
        process_group.from_first(lambda: evidence.save(arguments.out))
    for note in (*evidence.about["notes"], *evidence.warnings):
        log(f"warning: {note}")
    # By way of JSON text, which has null for NaN.
    record = {"evidence": arguments.out, **json.loads(rx.serialization.json_text(evidence.to_record()))}
    written = f"evidence: {arguments.out or 'printed only; --out FILE writes it'}"
    shown = (_findings_table(evidence), *_robustness_tables(evidence), written, evidence.summary)
    return Outcome(record, shown, code=1 if evidence.failures else 0)


def _requested(arguments: Namespace) -> "list[rx.checks.RequestedCheck]":
    """Returns the requested checks, by default all that do not need to be requested."""
    if arguments.checks is not None:
        requested = list(rx.checks.parse_checks(arguments.checks))
    else:
        checks = rx.checks.all_checks().items()
        requested = [rx.checks.RequestedCheck(name) for name, check in checks if not check.on_request]
    if arguments.controls and "controls" not in [one.name for one in requested]:
        requested.append(rx.checks.RequestedCheck("controls"))
    return requested


def _require_effects(arguments: Namespace, requested: "Sequence[rx.checks.RequestedCheck]") -> None:
    """Raises InvalidInput for options of checks that do not run, or that a knob of the check states too."""
    checks = {one.name: one for one in requested}
    needed = {"--most-drop": "accuracy", "--draws": "controls", "--diagnosis": "controls"}
    for name, check in needed.items():
        if getattr(arguments, name[2:].replace("-", "_")) is not None and check not in checks:
            advice = "add --controls" if check == "controls" else f"add {check} to --checks"
            raise InvalidInput(f"{name} belongs to the check {check}, which is not requested; {advice}, or omit it.")
    if arguments.most_drop is not None and "most_drop" in checks["accuracy"].knobs:
        raise InvalidInput("--most-drop and accuracy(most_drop=...) set one limit; give one of them.")


def _masked(
    arguments: Namespace, candidate: "nn.Module", reference: "nn.Module", origin: CandidateOrigin
) -> "nn.Module | None":
    """Returns the masked model: the given one, the candidate if it is a mask, or one made by the prescription."""
    if arguments.masked is not None:
        masked = model_argument(arguments.masked, arguments.device, trust=arguments.trust)
        return masked_model(masked, arguments.masked, reference, origin)
    if origin.how.get("by") == "mask":
        return candidate
    return None if origin.prescription is None else rx.realize(reference, origin.prescription, by="mask")


def _controls(
    arguments: Namespace,
    reference: "nn.Module",
    origin: CandidateOrigin,
    diagnosis: "rx.Diagnosis | None",
    training: "rx.data.ImageSet",
) -> dict[str, Any]:
    """Returns controls with the candidate's ranks, realized with its settings."""
    prescription, how = origin.prescription, origin.how
    if prescription is None or diagnosis is None or not how:
        raise InvalidInput(
            "controls are prescribed from a diagnosis and realized with the candidate's settings: give --diagnosis "
            "FILE, and a candidate made by `attnrx realize`, whose folder records them."
        )
    calibration = training.take(min(how["calibration_images"], len(training)))
    draws = RANDOM_CONTROLS if arguments.draws is None else arguments.draws
    prescriptions = rx.control_prescriptions(diagnosis, prescription, draws=draws, seed=arguments.seed)
    from attnrx.change.realization.fits import realize_and_fit, recorded_fits  # imports torch

    # With the recorded seeds and all other settings: a control is fitted as the candidate was.
    how = {"images": calibration, "fits": recorded_fits(how), "by": how["by"], "norms": how["norms"]}
    return {"prescriptions": prescriptions, "realize": partial(realize_and_fit, reference, **how)}


def _findings_table(evidence: "rx.Evidence") -> Table:
    """Returns the findings, claims first; reported findings on corrupted images are in `_robustness_tables`."""
    reported = [finding for finding in evidence.findings if not finding.is_claim and finding.check != "robustness"]
    rows = tuple(
        (
            finding.claim,
            significant(finding.value, finding.unit),
            "" if finding.low is None or finding.high is None else f"[{finding.low:.4g}, {finding.high:.4g}]",
            "" if finding.limit is None else significant(finding.limit, finding.unit),
            finding.outcome_text if finding.is_claim else "",
        )
        for finding in (*evidence.claims, *reported)
    )
    return Table(("finding", "value", "95 % interval", "limit", ""), rows)


def _robustness_tables(evidence: "rx.Evidence") -> list[Table]:
    """Returns one table per severity: both accuracies for each corruption, and their means."""
    findings = [finding for finding in evidence.of("robustness") if "reference_accuracy" in finding.details]
    severities = sorted({finding.details["severity"] for finding in findings if "severity" in finding.details})
    # Title, severity (None for the table of all), and the severities that its means are over.
    parts = [(f"accuracy on images corrupted at severity {each}, in %", each, [each]) for each in severities]
    if len(severities) > 1:
        parts.append(("over all severities", None, severities))
    tables = []
    for title, severity, averaged in parts:
        single = [one for one in findings if severity is not None and one.details.get("severity") == severity]
        means = [one for one in findings if one.details.get("severities") == averaged]
        tables.append(Table(CORRUPTED, tuple(map(_corrupted, (*single, *means))), title))
    return tables


def _corrupted(finding: "rx.Finding") -> tuple[str, ...]:
    details = finding.details
    name = details["corruption"] if "severity" in details else f"mean of {len(details['corruptions'])}"
    accuracies = (f"{details[role]:.1f}" for role in ("reference_accuracy", "candidate_accuracy"))
    return (name, *accuracies, f"{finding.value:+.1f}", f"[{finding.low or 0.0:+.1f}, {finding.high or 0.0:+.1f}]")
