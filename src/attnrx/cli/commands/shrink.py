"""attnrx shrink: one command to a smaller model for a target, with evidence, a report and a file for ONNX Runtime."""

from argparse import Namespace
from pathlib import Path

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.outcome import Outcome, significant
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

SUMMARY = "make a model smaller and faster for a target, without labels, and verify what it cost"
EXAMPLE = "attnrx shrink timm:vit_tiny_patch16_224 --data imagenette224.parquet --faster 1.6 --out runs/shrunk"


TARGETS = ("faster", "macs", "params", "max_drop")
# The quantities of the claims about a target that is measured; MACs and parameters are met by construction.
MEASURED_TARGETS = {"latency": ("promised speed", "speed"), "max-drop": ("promised_change",)}
SETTINGS = ("batch", "threads", "seed")


def add(parser: options.Parser) -> None:
    options.add_model(parser, "the model to make smaller")
    options.add_data(parser, "the images to plan and to verify on")
    target = parser.add_mutually_exclusive_group(required=True)
    options.add_arguments(target, "shrink", faster="TIMES", macs="SHARE", params="SHARE", max_drop=options.POINTS)
    options.add_out(
        parser, "the folder of the model, its evidence, report, card and model.onnx", "runs/shrunk", folder=True
    )
    options.add_arguments(parser, "shrink", *SETTINGS, effort=options.EFFORTS, to="FORMAT")
    options.option(parser, "--no-onnx", bool, "write no model.onnx")
    options.add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.verbs.load import preflight  # imports torch

    onnx = not arguments.no_onnx
    formats = (rx.exporting.parse_format("onnx"),) if onnx else ()
    preflight(folder=arguments.out, formats=formats, report=True)
    log(f"loading {arguments.model} and {arguments.data}")
    model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    splits = splits_argument(model, arguments)
    settings = options.given_arguments(arguments, *TARGETS, *SETTINGS, "effort", "to")
    shrunk = rx.shrink(model, splits, **settings, folder=arguments.out, log=log)
    log(shrunk.summary())
    log("writing the folder and model.onnx, and timing it" if onnx else "writing the folder")
    timing = options.given_arguments(arguments, "batch", "threads")
    folder = shrunk.save(arguments.out, onnx, to=arguments.to, original=model, **timing)
    name = None if arguments.to is None else rx.exporting.parse_format(arguments.to).name
    exported = None if name is None else rx.Evidence.load(folder / f"evidence-{name}.json")
    record = {
        "summary": shrunk.summary(),
        "folder": str(folder),
        "prescription": None if shrunk.prescription is None else str(shrunk.prescription),
        "files": rx.reports.written_files(folder),
        "evidence": shrunk.evidence.to_record(),
        "evidence_exported": None if exported is None else exported.to_record(),
    }
    lines: list[str] = [shrunk.summary(), f"model: {folder}", f"report: {Path(folder) / 'report.html'}"]
    if exported is not None:
        lines.append(f"{exported.about['file']}: {rx.reports.summary_of(exported)}")
    lines.append(aligned_table(*rx.reports.files_table(folder)))
    failed = [finding for each in (shrunk.evidence, exported) if each is not None for finding in each.failures]
    missed = [is_target(finding, shrunk.target.quantity) for finding in failed]
    notes = (failure(finding, target) for finding, target in zip(failed, missed, strict=True))
    warnings = (f"warning: {each}" for each in shrunk.evidence.warnings)
    return Outcome(record, (*lines, *notes, *warnings), code=1 if any(missed) else 0)


def is_target(finding: "rx.Finding", quantity: str) -> bool:
    """Whether a claim is that of the target, and not one of the other predictions of the plan."""
    return finding.details.get("quantity") in MEASURED_TARGETS.get(quantity, ())


def failure(finding: "rx.Finding", target: bool) -> str:
    """Returns a claim that fails as a line; a prediction that is not the target is no limit of the user's."""
    value, limit = (significant(number, finding.unit) for number in (finding.value, finding.limit or 0.0))
    start = "target missed" if target else "worse than the plan predicted (not your target)"
    return f"{start}: {finding.claim}: {value}, limit {limit}"
