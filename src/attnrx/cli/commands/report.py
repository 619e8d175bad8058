"""attnrx report: writes the results of the other commands into one HTML page."""

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.options import COUNT
from attnrx.cli.outcome import Outcome
from attnrx.cli.parser import Parser, add_data, add_device, add_out, add_trust
from attnrx.errors import CheckpointError, InvalidInput
from attnrx.progress import Log

if TYPE_CHECKING:
    import torch
    from torch import nn

SUMMARY = "write diagnosis, prescription and evidence into one HTML page"
EXAMPLE = "attnrx report --candidate runs/cifar10-slim --diagnosis diagnosis.json --out report.html"


def add(parser: Parser) -> None:
    """Declares the options."""
    parser.add_argument("--candidate", metavar="FOLDER", help="its evidence and prescription are shown, unless given")
    add_trust(parser)
    parser.add_argument("--evidence", metavar="FILE", help="the file of `attnrx verify`")
    parser.add_argument("--prescription", metavar="FILE", help="the file of `attnrx prescribe`")
    parser.add_argument("--diagnosis", metavar="FILE", help="the file of `attnrx diagnose`")
    parser.add_argument("--training", metavar="FOLDER", help="the folder of `attnrx train`, for its curves")
    parser.add_argument(
        "--trade-off", nargs="+", default=(), metavar="FILE", help="evidence at several rho, shown as one curve"
    )
    parser.add_argument("--comparison", metavar="FILE", help="the file of `attnrx compare`, shown as curves over MACs")
    parser.add_argument("--title", help="the title of the page")
    add_out(parser, "the page", kind="attnrx report")
    maps = parser.add_argument_group(
        "attention maps and tokens, which need --candidate and --data, and maps --reference"
    )
    maps.add_argument("--reference", metavar="MODEL", help="the model the candidate was made from")
    maps.add_argument("--weights", metavar="FILE", help="the weights of a reference timm:NAME, in a local file")
    maps.add_argument("--samples", type=COUNT, default=6, metavar="N", help="test images to show (6)")
    add_data(parser, "whose test images are shown", required=False)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Collects the given parts and writes the page."""
    evidence, prescription = _evidence(arguments), _prescription(arguments)
    attention, tokens = _samples(arguments, prescription)
    content = rx.reports.ReportContent(
        title=arguments.title or f"attnrx: {_subject(arguments)}",
        about=_about(arguments, evidence),
        prescription=prescription,
        diagnosis=rx.Diagnosis.load(arguments.diagnosis) if arguments.diagnosis else None,
        evidence=evidence,
        trade_off=tuple(_point(path) for path in arguments.trade_off),
        attention=attention,
        tokens=tokens,
        history=_history(arguments.training) if arguments.training else (),
        ranks=_ranks(arguments, prescription),
        comparison=rx.reports.ComparisonRecord.load(arguments.comparison) if arguments.comparison else None,
    )
    path = rx.write_report(arguments.out, content)
    outcome = None if evidence is None else evidence.outcome
    return Outcome({"report": str(path), "bytes": path.stat().st_size, "outcome": outcome}, (f"report: {path}",))


def _subject(arguments: Namespace) -> str:
    return arguments.candidate or arguments.comparison or arguments.out


def _beside(given: str | None, candidate: str | None, name: str) -> Path | None:
    """Returns the given file, or the one in the candidate's folder; None if there is none."""
    if given is not None:
        return Path(given)
    path = Path(candidate or "") / name
    return path if candidate and path.exists() else None


def _evidence(arguments: Namespace) -> "rx.Evidence | None":
    path = _beside(arguments.evidence, arguments.candidate, "evidence.json")
    if path is None:
        return None
    evidence = rx.Evidence.load(path)
    if arguments.candidate is not None:
        fingerprint = rx.models.model_fingerprint(rx.load(arguments.candidate, trust=arguments.trust))
        evidence.require(fingerprint, f"--candidate {arguments.candidate}")
    return evidence


def _prescription(arguments: Namespace) -> "rx.Prescription | None":
    path = _beside(arguments.prescription, arguments.candidate, "prescription.json")
    return None if path is None else rx.Prescription.load(path)


def _ranks(arguments: Namespace, prescription: "rx.Prescription | None") -> "tuple[rx.reports.PathwayRanks, ...]":
    """Reads the ranks from the candidate if there is no prescription, unless only its tokens are reduced."""
    if arguments.candidate is None or prescription is not None:
        return ()
    candidate = model_argument(arguments.candidate, "cpu", trust=arguments.trust)
    found = rx.reports.model_ranks(candidate)
    full = all(pathway.kept == pathway.full for pathway in found)
    return () if full and rx.models.reduction_of(candidate) is not None else found


def _about(arguments: Namespace, evidence: "rx.Evidence | None") -> dict[str, Any]:
    named = {name: getattr(arguments, name) for name in ("candidate", "reference", "training", "comparison", "data")}
    return {**{name: value for name, value in named.items() if value}, **(evidence.about if evidence else {})}


def _history(folder: str) -> tuple[Mapping[str, Any], ...]:
    path = Path(folder) / "history.jsonl"
    try:
        return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"--training {folder}: {path} cannot be read ({error}); give the --out folder of `attnrx train`."
        ) from error


def _point(path: str) -> "rx.reports.TradeOffPoint":
    evidence = rx.Evidence.load(path)
    rules, kind = evidence.about.get("rules") or {}, evidence.about.get("realization")
    text = rules.get("qk")
    rho = None if text is None else getattr(rx.parse_rule(text), "rho", None)
    if rho is None or kind is None:
        raise InvalidInput(
            f"--trade-off {path}: evidence of the rule {text} as {kind!r} is no point over rho; "
            "give that of candidates which `attnrx realize` made by a rule with rho, such as energy_retention:0.9."
        )
    change = _finding(evidence, path, "accuracy", "accuracy change")
    discrepancy = _finding(evidence, path, "fidelity", "discrepancy")
    return rx.reports.TradeOffPoint(
        rho=rho,
        kind=kind,
        removed_share=evidence.about["removed_share"],
        discrepancy=discrepancy.value,
        accuracy_change=change.value,
        accuracy_interval=_interval(change),
        discrepancy_interval=_interval(discrepancy),
    )


def _finding(evidence: "rx.Evidence", path: str, check: str, quantity: str) -> "rx.Finding":
    """Returns the first finding of a quantity, which is the candidate against the reference in every check."""
    found = [finding for finding in evidence.of(check) if finding.details.get("quantity") == quantity]
    if not found:
        raise InvalidInput(f"--trade-off {path}: there is no {quantity} in it; verify with the check {check} too.")
    return found[0]


def _interval(finding: "rx.Finding") -> tuple[float, float] | None:
    return None if finding.low is None or finding.high is None else (finding.low, finding.high)


Samples = tuple["rx.reports.AttentionSamples | None", "rx.reports.TokenSamples | None"]


def _samples(arguments: Namespace, prescription: "rx.Prescription | None") -> Samples:
    """Returns token samples for a candidate with token reduction, else attention samples, which need a reference."""
    if arguments.reference is None and arguments.weights is not None:
        raise InvalidInput("--weights are those of --reference; add it.")
    if arguments.candidate is None or arguments.data is None:
        if arguments.reference is not None:
            raise InvalidInput("--reference is for attention maps, which need --candidate and --data too; add them.")
        return None, None
    candidate = model_argument(arguments.candidate, arguments.device, trust=arguments.trust)
    reference = None
    if arguments.reference is not None:
        reference = model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
    images, labels = _shown(candidate, arguments)
    if rx.models.reduction_of(candidate) is not None:
        return None, rx.reports.sample_tokens(candidate, images, labels, reference)
    if reference is None:
        raise InvalidInput(
            f"--data is for attention maps, which need --reference too, or for models with token reduction, and "
            f"{arguments.candidate} has none; add --reference, or omit --data."
        )
    models = {"original": reference}
    if prescription is not None:
        models["masked"] = rx.realize(reference, prescription, by="mask")
    return rx.reports.sample_attention({**models, "compressed": candidate}, images, labels), None


def _shown(model: "nn.Module", arguments: Namespace) -> "tuple[torch.Tensor, tuple[str, ...]]":
    """Returns the first test images, normalized for the model, and their class names."""
    splits = splits_argument(model, arguments)
    shown = splits.test.take(min(arguments.samples, len(splits.test)))
    batch = next(iter(shown.batches(arguments.samples)))
    names = (splits.class_names[label] for label in batch.labels.tolist())
    return batch.images, tuple(f"class {name}" if name.isdigit() else name for name in names)
