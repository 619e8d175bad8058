"""attnrx verify: compares a candidate with its reference on images and writes evidence. Exit code 1: a claim fails."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import chosen_images, kind_of, made, model_argument, splits_argument
from attnrx.cli.options import DRAWS, POINTS
from attnrx.cli.outcome import Outcome, findings_table, robustness_tables
from attnrx.cli.parser import Parser, add_backend, add_data, add_running, add_split, add_trust
from attnrx.errors import InvalidInput
from attnrx.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "collect evidence of what a candidate costs against its reference"
EXAMPLE = "attnrx verify runs/cifar10-slim --reference runs/cifar10 --data cifar10 --out evidence.json"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("candidate", help="the folder of a realized model, or a file that was exported")
    parser.add_argument("--reference", required=True, metavar="MODEL", help="the model it was made from")
    parser.add_argument("--weights", metavar="FILE", help="the weights of a reference timm:NAME, in a local file")
    add_trust(parser)
    add_data(parser, "the images to compare both models on")
    parser.add_argument("--out", metavar="FILE", help="the evidence, one JSON file (printed only)")
    parser.kind = "attnrx evidence"
    made_from = parser.add_argument_group("origin of the candidate")
    made_from.add_argument("--prescription", metavar="FILE", help="(the one in the candidate's folder)")
    made_from.add_argument("--diagnosis", metavar="FILE", help="needed for controls")
    made_from.add_argument("--masked", metavar="MODEL", help="the masked model (realized from the prescription)")
    chosen = parser.add_argument_group("checks")
    chosen.add_argument(
        "--checks",
        metavar="CHECKS",
        help="names with knobs in brackets: accuracy,robustness(severities=3,corruptions=fog/snow) or "
        "transfer(per_class=50); promises for a plan (all but controls, promises and transfer)",
    )
    chosen.add_argument("--controls", action="store_true", help="also compare with rank-matched controls")
    chosen.add_argument("--draws", type=DRAWS, default=10, metavar="N", help="random controls (10)")
    chosen.add_argument("--most-drop", type=POINTS, metavar="POINTS", help="accuracy the candidate may lose (1.0)")
    add_backend(parser)
    add_split(parser, "test")
    add_running(parser, 256)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Verifies the candidate and writes the evidence."""
    from attnrx.runtime import processes  # imports torch

    _, count = processes.join_process_group()
    requested = _requested(arguments)
    case = _Case.of(arguments)
    images = chosen_images(case.splits, arguments)
    checks = _checks(requested, case, arguments)
    log(f"verifying {arguments.candidate} on {len(images):,} images: {', '.join(check.name for check in checks)}")
    given = case.prescription
    evidence = rx.verify(
        case.candidate,
        case.reference,
        images,
        checks,
        {"realization": case.kind, "removed_share": given and given.removed_share},
        masked=case.masked,
        prescription=given,
        diagnosis=case.diagnosis,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        together=count > 1,
    )
    if arguments.out is not None:
        processes.from_first(lambda: evidence.save(arguments.out))
    record = {"evidence": arguments.out, **json.loads(rx.serialization.json_text(evidence.to_record()))}
    for note in evidence.about["notes"]:
        log(f"warning: {note}")
    tables = (findings_table(evidence), *robustness_tables(evidence))
    written = f"evidence: {arguments.out or 'printed only; --out FILE writes it'}"
    return Outcome(record, (*tables, evidence.summary, written), code=1 if evidence.failures else 0)


@dataclass(frozen=True, eq=False)
class _Case:
    """The loaded inputs; `how` are the settings of `attnrx realize` recorded for the candidate."""

    candidate: "nn.Module"
    reference: "nn.Module"
    splits: "rx.data.Splits"
    prescription: "rx.Prescription | None"
    diagnosis: "rx.Diagnosis | None"
    masked: "nn.Module | None"
    how: Mapping[str, Any]

    @classmethod
    def of(cls, arguments: Namespace) -> "_Case":
        """Loads the inputs; prescription and masked model default to those of the candidate's folder."""
        prescription, how = _prescription(arguments), _how(arguments)
        diagnosis = None if arguments.diagnosis is None else rx.Diagnosis.load(arguments.diagnosis)
        candidate = model_argument(arguments.candidate, arguments.device, trust=arguments.trust)
        if arguments.backend is not None:
            rx.use_backend(candidate, arguments.backend)
        reference = model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
        if arguments.masked is not None:
            masked = model_argument(arguments.masked, arguments.device, trust=arguments.trust)
        elif how.get("by") == "mask":
            masked = candidate
        else:
            masked = None if prescription is None else rx.realize(reference, prescription, by="mask")
        return cls(candidate, reference, splits_argument(reference, arguments), prescription, diagnosis, masked, how)

    @property
    def kind(self) -> str | None:
        """The kind of realization in one word; None if it is unknown."""
        return kind_of(self.how)

    def inputs(self, check: str, arguments: Namespace) -> dict[str, Any]:
        """Returns the inputs of a check other than its knobs."""
        if check == "controls":
            return self._controls(arguments.draws, arguments.seed)
        if check == "transfer":
            return {"training": self.splits.train, "classes": rx.data.own_classes(self.splits)}
        return {}

    def _controls(self, draws: int, seed: int) -> dict[str, Any]:
        """Returns controls with the candidate's ranks, realized with its settings."""
        if self.prescription is None or self.diagnosis is None or not self.how:
            raise InvalidInput(
                "controls are prescribed from a diagnosis and realized with the candidate's settings: give --diagnosis "
                "FILE, and a candidate made by `attnrx realize`, whose folder records them."
            )
        train = self.splits.train
        calibration = train.take(min(self.how["calibration_images"], len(train)))
        realize = partial(made, self.reference, how=self.how, calibration=calibration)
        prescriptions = rx.control_prescriptions(self.diagnosis, self.prescription, draws=draws, seed=seed)
        return {"prescriptions": prescriptions, "realize": realize}


def _prescription(arguments: Namespace) -> "rx.Prescription | None":
    in_folder = _candidate_prescription(arguments)
    path = arguments.prescription or (in_folder if in_folder.exists() else None)
    return None if path is None else rx.Prescription.load(path)


def _how(arguments: Namespace) -> dict[str, Any]:
    path = _candidate_prescription(arguments)
    return dict(rx.Prescription.load(path).about.get("realized", {})) if path.exists() else {}


def _candidate_prescription(arguments: Namespace) -> Path:
    return Path(arguments.candidate) / "prescription.json"


def _requested(arguments: Namespace) -> "list[rx.checks.RequestedCheck]":
    """Returns the requested checks, by default all that do not need to be requested."""
    known = rx.checks.all_checks()
    if arguments.checks is not None:
        requested = list(rx.checks.parse_checks(arguments.checks))
    else:
        requested = [rx.checks.RequestedCheck(name) for name, check in known.items() if not check.on_request]
    missing = arguments.controls and "controls" not in [one.name for one in requested]
    return [*requested, rx.checks.RequestedCheck("controls")] if missing else requested


def _checks(
    requested: "Sequence[rx.checks.RequestedCheck]", case: _Case, arguments: Namespace
) -> "list[rx.checks.Check]":
    """Builds the checks with their knobs and inputs."""
    built = []
    for one in requested:
        knobs = dict(one.knobs)
        if one.name == "accuracy" and arguments.most_drop is not None:
            knobs["most_drop"] = arguments.most_drop
        make: Any = rx.checks.all_checks()[one.name]
        built.append(make(**knobs, **case.inputs(one.name, arguments)))
    return built
