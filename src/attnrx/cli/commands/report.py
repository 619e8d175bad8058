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
    maps = parser.add_argument_group(
        "attention maps and tokens, which need --candidate and --data, and maps --reference"
    )
    option(maps, "--reference", "MODEL", "the model the candidate was made from")
    option(maps, "--weights", "FILE", "the weights of a reference timm:NAME, in a local file")
    option(maps, "--samples", COUNT, "test images to show", 6)
    add_data(parser, "whose test images are shown", required=False)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    name = arguments.candidate
    candidate = None if name is None else model_argument(name, arguments.device, trust=arguments.trust)
    from attnrx.verbs.verify import stored_folder  # imports torch

    folder = None if name is None or candidate is None else stored_folder(name, candidate)
    evidence = _part(rx.Evidence, arguments.evidence, folder, "evidence.json")
    # Evidence of another model beside this candidate's maps would be wrong without any sign of it.
    if evidence is not None and candidate is not None:
        evidence.require(rx.models.model_fingerprint(candidate), f"--candidate {name}")
    prescription = _part(rx.Prescription, arguments.prescription, folder, "prescription.json")
    attention, tokens = _samples(arguments, candidate, prescription)
    subject = name or arguments.out
    named = {option: getattr(arguments, option) for option in ("candidate", "reference", "data")}
    about = {option: value for option, value in named.items() if value}
    content = rx.reports.ReportContent(
        title=arguments.title or f"attnrx: {subject}",
        # Fields of the evidence have precedence, because they are about its numbers.
        about=about if evidence is None else {**about, **evidence.about},
        prescription=prescription,
        diagnosis=_part(rx.Diagnosis, arguments.diagnosis),
        evidence=evidence,
        attention=attention,
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


Samples = tuple["rx.reports.AttentionSamples | None", "rx.reports.TokenSamples | None"]


def _samples(arguments: Namespace, candidate: "nn.Module | None", prescription: "rx.Prescription | None") -> Samples:
    """Returns token samples for a candidate with token reduction, else attention samples, which need a reference."""
    if arguments.reference is None and arguments.weights is not None:
        raise InvalidInput("--weights are those of --reference; add it.")
    if candidate is None or arguments.data is None:
        if arguments.reference is not None:
            raise InvalidInput("--reference is for attention maps, which need --candidate and --data too; add them.")
        return None, None
    reference = None
    if arguments.reference is not None:
        reference = model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
    has_tokens = rx.models.reduction_of(candidate) is not None
    if has_tokens and reference is not None:
        raise InvalidInput(f"--reference is for attention maps, and {arguments.candidate} reduces tokens; omit it.")
    splits = splits_argument(candidate, arguments)
    images, labels = rx.reports.first_images(splits.test, splits.class_names, arguments.samples)
    if has_tokens:
        return None, rx.reports.sample_tokens(candidate, images, labels)
    if reference is None:
        raise InvalidInput(
            f"--data is for attention maps, which need --reference too, or for models with token reduction, and "
            f"{arguments.candidate} has none; add --reference, or omit --data."
        )
    models = {"original": reference}
    if prescription is not None:
        models["masked"] = rx.realize(reference, prescription, by="mask")
    return rx.reports.sample_attention({**models, "compressed": candidate}, images, labels), None
