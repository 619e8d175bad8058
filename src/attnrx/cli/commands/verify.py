"""attnrx verify: compares a candidate with its reference on images and writes evidence. Exit code 1: a claim fails."""

import json
from argparse import Namespace

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import chosen_images, model_argument, splits_argument
from attnrx.cli.outcome import Outcome
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log

SUMMARY = "collect evidence of what a candidate costs against its reference"
EXAMPLE = "attnrx verify runs/cifar10-slim --reference runs/cifar10 --data cifar10 --out evidence.json"

CHECKS = (
    "names with knobs in brackets: accuracy(most_drop=0.5),robustness(severities=3,corruptions=fog/snow); "
    "controls(draws=10) compares with rank-matched ones, promises with the plan (accuracy, fidelity, calibration, "
    "costs and latency, where data and models allow them)"
)


def add(parser: options.Parser) -> None:
    parser.add_argument("candidate", help="the folder of a realized model, or a file that was exported")
    options.option(parser, "--reference", "MODEL", "the model it was made from", required=True)
    options.option(parser, "--weights", "FILE", "the weights of a reference timm:NAME, in a local file")
    options.add_trust(parser)
    options.add_data(parser, "the images to compare both models on")
    options.option(parser, "--out", "FILE", "the evidence, one JSON file (printed only)")
    parser.kind = "attnrx evidence"
    origin = parser.add_argument_group("origin of the candidate")
    options.option(origin, "--prescription", "FILE", "(the one in the candidate's folder)")
    options.option(origin, "--diagnosis", "FILE", "needed for controls")
    checks = parser.add_argument_group("checks")
    options.option(checks, "--checks", "CHECKS", CHECKS)
    options.add_split(parser, "test")
    options.add_running(parser, 256)


def run(arguments: Namespace, log: Log) -> Outcome:
    # Before the models are loaded, so that a typing error is reported at once.
    checks = None if arguments.checks is None else rx.checks.parse_checks(arguments.checks)
    if arguments.diagnosis is not None and "controls" not in [check.name for check in checks or ()]:
        raise InvalidInput("--diagnosis belongs to the check controls: add it to --checks, or omit --diagnosis.")
    diagnosis = None if arguments.diagnosis is None else rx.Diagnosis.load(arguments.diagnosis)
    prescription = None if arguments.prescription is None else rx.Prescription.load(arguments.prescription)
    candidate = model_argument(arguments.candidate, arguments.device, trust=arguments.trust)
    reference = model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
    splits = splits_argument(reference, arguments, distinct=True)
    for note in splits.notes:
        log(f"{splits.name}: {note}")
    images = chosen_images(splits, arguments)
    log(f"verifying {arguments.candidate} on {len(images):,} images")
    evidence = rx.verify(
        candidate,
        reference,
        images,
        checks,
        origin=arguments.candidate,
        prescription=prescription,
        diagnosis=diagnosis,
        splits=splits,
        **options.given_arguments(arguments, "seed", "batch_size"),
    )
    if arguments.out is not None:
        evidence.save(arguments.out)
    for note in (*evidence.about["notes"], *evidence.warnings):
        log(f"warning: {note}")
    # By way of JSON text, which has null for NaN.
    record = {"evidence": arguments.out, **json.loads(rx.serialization.json_text(evidence.to_record()))}
    written = f"evidence: {arguments.out or 'printed only; --out FILE writes it'}"
    return Outcome(record, (str(evidence), written, evidence.summary), code=1 if evidence.failures else 0)
