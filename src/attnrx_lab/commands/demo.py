"""attnrx demo: trains a small model, compresses it, verifies the result, and writes a report."""

from argparse import Namespace

from attnrx.cli.options import COUNT, SEED, Outcome, Parser, add_out, command
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table


def _options(parser: Parser) -> None:
    parser.add_argument("--data", default="cluttered-digits", metavar="NAME", help="a dataset's name or path")
    parser.add_argument("--epochs", type=COUNT, metavar="N", default=2, help="of the training (2)")
    parser.add_argument("--seed", type=SEED, default=0, help="(0)")
    add_out(parser, "the folder of everything", "runs/demo", folder=True)


@command(
    "train a small ViT on digits among clutter, make it smaller, and show what it cost",
    "attnrx demo --out runs/demo",
    _options,
)
def demo(arguments: Namespace, log: Log) -> Outcome:
    """Runs all steps of the demo. The exit code is 1 if a claim in the evidence fails."""
    # These imports load torch, which `--help` does not need.
    from attnrx.show.reports import files_table
    from attnrx_lab import demo as demonstration

    result = demonstration.demo(arguments.data, arguments.out, epochs=arguments.epochs, seed=arguments.seed, log=log)
    evidence = result.evidence
    by_compression = next(
        (each.value for each in evidence.findings if each.details.get("quantity") == "speed by compression"), None
    )
    open_claims = (*evidence.failures, *evidence.undecided)
    record = {
        "summary": result.summary,
        "accuracy": result.accuracy,
        "speed_by_compression": by_compression,
        "report": str(result.report),
        "outcome": evidence.outcome,
        "failures": [finding.claim for finding in evidence.failures],
        "undecided": [finding.claim for finding in evidence.undecided],
        "seconds": result.seconds,
    }
    shown = (
        f"original: {result.accuracy:.1f} % of the test images right",
        f"smaller:  {result.summary}",
        *([] if by_compression is None or by_compression >= demonstration.LEAST else [_too_slow(by_compression)]),
        evidence.summary,
        *(f"  {each.outcome_text}: {each.claim}, {each.value:.4g}, limit {each.limit:g}" for each in open_claims),
        aligned_table(*files_table(result.folder)),
        f"report:   {result.report}      ({result.seconds:.0f} s)",
    )
    return Outcome(record, shown, code=1 if evidence.failures else 0)


def _too_slow(speed: float) -> str:
    from attnrx_lab.demo import LEAST

    return (
        f"          the compression alone: {speed:.2f}x, less than {LEAST:g}x: it made the model smaller, hardly faster"
    )
