"""attnrx report: writes the results of the other commands into one HTML page."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import COUNT, add_data, add_device, add_out, add_trust, option
from attnrx.cli.outcome import Outcome
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log

if TYPE_CHECKING:
    from torch import nn

SUMMARY = "write diagnosis, prescription and evidence into one HTML page"
EXAMPLE = "attnrx report --candidate runs/cifar10-slim --diagnosis diagnosis.json --out report.html"


def add(parser: Parser) -> None:
    option(parser, "--candidate", "FOLDER", "its evidence and prescription are shown, unless given")
    add_trust(parser)
    option(parser, "--evidence", "FILE", "the file of `attnrx verify`")
    option(parser, "--prescription", "FILE", "the file of `attnrx prescribe`")
    option(parser, "--diagnosis", "FILE", "the file of `attnrx diagnose`")
    option(parser, "--title", "TITLE", "the title of the page")
    add_out(parser, "the page", kind="attnrx report")
    option(parser, "--samples", COUNT, "test images whose tokens are shown, of a --candidate with token reduction", 6)
    add_data(parser, "whose test images are shown", required=False)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    name = arguments.candidate
    candidate = None if name is None else model_argument(name, arguments.device, trust=arguments.trust)
    from attnrx.verbs.verify import stored_folder  # imports torch

    folder = None if name is None or candidate is None else stored_folder(name, candidate)
    evidence = _part(rx.Evidence, arguments.evidence, folder, "evidence.json")
    # Evidence of another model beside this candidate's pictures would be wrong without any sign of it.
    if evidence is not None and candidate is not None:
        evidence.require(rx.models.model_fingerprint(candidate), f"--candidate {name}")
    prescription = _part(rx.Prescription, arguments.prescription, folder, "prescription.json")
    tokens = _samples(arguments, candidate)
    subject = name or arguments.out
    named = {option: getattr(arguments, option) for option in ("candidate", "data")}
    about = {option: value for option, value in named.items() if value}
    content = rx.reports.ReportContent(
        title=arguments.title or f"attnrx: {subject}",
        # Fields of the evidence have precedence, because they are about its numbers.
        about=about if evidence is None else {**about, **evidence.about},
        prescription=prescription,
        diagnosis=_part(rx.Diagnosis, arguments.diagnosis),
        evidence=evidence,
        tokens=tokens,
    )
    path = rx.write_report(arguments.out, content)
    outcome = None if evidence is None else evidence.outcome
    return Outcome({"report": str(path), "bytes": path.stat().st_size, "outcome": outcome}, (f"report: {path}",))


def _part(kind: Any, given: str | None, folder: Path | None = None, name: str = "") -> Any:
    """Loads the given file, or the one of this name in the candidate's folder; None if there is none."""
    # A file that is named must exist; those of the candidate are optional.
    if given is None and folder is not None and (folder / name).exists():
        return kind.load(folder / name)
    return None if given is None else kind.load(given)


def _samples(arguments: Namespace, candidate: "nn.Module | None") -> "rx.reports.TokenSamples | None":
    """Returns token samples for a candidate with token reduction, if data are given."""
    if candidate is None or arguments.data is None:
        return None
    if rx.models.reduction_of(candidate) is None:
        raise InvalidInput(
            f"--data is for pictures of the tokens, which {arguments.candidate} does not reduce; omit it."
        )
    splits = splits_argument(candidate, arguments)
    images, labels = rx.reports.first_images(splits.test, splits.class_names, arguments.samples)
    return rx.reports.sample_tokens(candidate, images, labels)
