"""attnrx demo: trains, compresses and verifies a model on a dataset, and writes its report."""

from argparse import Namespace

from attnrx.cli.options import COUNT, SEED, add_out
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser
from attnrx.progress import Log

SUMMARY = "go the whole way on one dataset, from training to a report"
EXAMPLE = "attnrx demo --data digits --out runs/demo"
COLUMNS = ("realization", "params saved", "MACs saved", "logit discrepancy", "agreement", "accuracy change, points")


def add(parser: Parser) -> None:
    parser.add_argument("--data", default="digits", metavar="NAME", help="a dataset's name or path (digits)")
    parser.add_argument("--epochs", type=COUNT, metavar="N", help="instead of what suits the dataset")
    parser.add_argument("--seed", type=SEED, default=42, help="(42)")
    add_out(parser, "the folder of everything", "runs/demo", folder=True)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Runs every step; exit code 1 if a claim fails. Undecided claims are printed as such."""
    from attnrx_lab.demo import demo

    result = demo(arguments.data, arguments.out, epochs=arguments.epochs, seed=arguments.seed, log=log)
    evidence = result.evidence
    open_claims = (*evidence.failures, *evidence.undecided)
    record = {
        "report": str(result.report),
        "evidence": str(result.evidence_path),
        "model": str(result.model),
        "accuracy": result.accuracy,
        "removed_share": result.removed_share,
        "realizations": [vars(row) for row in result.rows],
        "outcome": evidence.outcome,
        "failures": [finding.claim for finding in evidence.failures],
        "undecided": [finding.claim for finding in evidence.undecided],
        "seconds": result.seconds,
    }
    rows = tuple(
        (
            row.kind,
            f"{row.params_down:.2f} %",
            f"{row.macs_down:.2f} %",
            f"{row.discrepancy:.4f}",
            f"{row.agreement:.2f} %",
            f"{row.accuracy_change:+.2f} [{row.low:+.2f}, {row.high:+.2f}]",
        )
        for row in result.rows
    )
    shown = (
        Table(COLUMNS, rows),
        f"original: {result.accuracy:.2f} % of the test images right; "
        f"{100 * result.removed_share:.1f} % of its directions are removed",
        evidence.summary,
        *(f"  {each.outcome_text}: {each.claim}, {each.value:.4g}, limit {each.limit:g}" for each in open_claims),
        f"report:   {result.report}",
        f"evidence: {result.evidence_path}",
        f"model:    {result.model}      ({result.seconds:.0f} s)",
    )
    return Outcome(record, shown, code=1 if evidence.failures else 0)
