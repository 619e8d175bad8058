"""attnrx report: writes the results of the other commands into one HTML page."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import attnrx as rx
from attnrx.cli.options import Parser, add_out, add_trust, option
from attnrx.cli.outcome import Outcome
from attnrx.support.progress import Log

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


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.verbs.verify import stored_folder  # imports torch

    name = arguments.candidate
    candidate = None if name is None else rx.load(name, trust=arguments.trust)
    folder = None if name is None else stored_folder(name)
    evidence = _part(rx.Evidence, arguments.evidence, folder, "evidence.json")
    # Evidence of another model would be wrong without any sign of it.
    if evidence is not None and candidate is not None:
        evidence.require(rx.models.model_fingerprint(candidate), f"--candidate {name}")
    about = {} if name is None else {"candidate": name}
    content = rx.reports.ReportContent(
        title=arguments.title or f"attnrx: {name or arguments.out}",
        # Fields of the evidence have precedence, because they are about its numbers.
        about=about if evidence is None else {**about, **evidence.about},
        prescription=_part(rx.Prescription, arguments.prescription, folder, "prescription.json"),
        diagnosis=_part(rx.Diagnosis, arguments.diagnosis),
        evidence=evidence,
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
